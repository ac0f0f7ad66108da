"""What the commands read: ``key=value`` arguments, sizes, numbers, patterns of names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence

from tools.cli.catalogue import catalogue
from tools.cli.ranges import INTEGER, SIDE, range_of

DIGITS = 20  # more than any number in range has
# Options of backbones that are often typed without their backbone. in front.
OF_BACKBONE = ("mixer", "token_mixer", "drop_path_rate", "img_size")


def parse(
    arguments: Sequence[str],
    defaults: Mapping[str, str],
    choices: Mapping[str, Sequence[str]],
    more: str = "",
    *,
    takes_backbone: bool = False,
) -> dict[str, str]:
    """Options out of ``key=value`` arguments, with defaults.

    Args:
        arguments: As they were typed.
        defaults: All keys there are.
        choices: What an option may be, where that is a closed list.
        more: For the message, what else the command takes.
        takes_backbone: Whether it has taken out options of the backbone before.

    Raises:
        ValueError: Names the argument that is wrong.
    """
    options = dict(defaults)
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if key not in options or not equals or not value:
            near = difflib.get_close_matches(key, options, n=1) if key not in options else []
            meant = f" (did you mean {near[0]}=?)" if near else ""
            if takes_backbone and key.partition(".")[0] in OF_BACKBONE:
                meant = f" (did you mean backbone.{argument}?)"
            others = "backbone.OPTION" if takes_backbone else more
            raise ValueError(
                f"cannot use {argument!r}{meant}; arguments are key=value, with the keys "
                f"{', '.join(options)}{f' and {others}' if others else ''}; see --help"
            )
        options[key] = value
    for key, valid in choices.items():
        if options.get(key) and options[key] not in valid:
            raise ValueError(f"{key} must be one of {', '.join(valid)}; got {options[key]!r}")
    return options


def image_size(text: str, usual: int = 224) -> tuple[int, int]:
    """``224`` or ``800x1280`` as (H, W); ``usual`` for an empty text."""
    text = text or str(usual)
    size = _sides(text)
    if not 32 <= min(size) <= max(size) <= SIDE[1]:
        raise ValueError(
            "image_size must be 224 or 800x1280, from 64 up (32 with patch_size); got "
            f"{_cut(text)}, and the most is {SIDE[1]:,}"
        )
    return size


def grid(text: str) -> tuple[int, int]:
    """``14`` or ``14x28`` as (H, W)."""
    size = _sides(text)
    if not 1 <= min(size) <= max(size) <= SIDE[1]:
        raise ValueError(
            f"grid must be 14 or 14x28, or several with commas; got {_cut(text)}, and the most is "
            f"{SIDE[1]:,}"
        )
    return size


def _sides(text: str) -> tuple[int, int]:
    sides = re.fullmatch(r"(\d{1,9})(?:x(\d{1,9}))?", text)
    return (int(sides[1]), int(sides[2] or sides[1])) if sides else (0, 0)


def number(key: str, text: str, least: int = 1) -> int:
    """A whole number out of an option, up to what ``ranges`` says.

    Raises:
        ValueError: It is none, or out of range.
    """
    most = (range_of(key) or INTEGER)[1]
    if text.isdecimal() and len(text) < DIGITS and least <= int(text) <= most:
        return int(text)
    to = (
        f"{least} to {most:,.0f}"
        if text.isdecimal() and int(text[:DIGITS]) > most
        else f"{least} up"
    )
    raise ValueError(f"{key} must be a whole number from {to}; got {_cut(text)}")


def _cut(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:37]}...")


def select(text: str) -> list[str]:
    """Registered names out of names and patterns with commas between them."""
    known, names = catalogue(), []
    for item in text.split(","):
        found = known.list_backbones(item)
        if not found and any(sign in item for sign in "*?["):
            raise ValueError(f"no backbone matches {item!r}; 'swin_*' or '*_afbo' are patterns")
        # Refuses an unknown name with the nearest ones, and knows names that are not listed.
        names += found or [known.schema(item)["name"]]
    return list(dict.fromkeys(names))
