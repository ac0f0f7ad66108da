"""What the commands read: ``key=value`` arguments, sizes, numbers, patterns of names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence

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
    if min(size) < 32:
        raise ValueError(
            f"image_size must be 224 or 800x1280, from 64 up (32 with patch_size); got {text!r}"
        )
    return size


def grid(text: str) -> tuple[int, int]:
    """``14`` or ``14x28`` as (H, W)."""
    size = _sides(text)
    if min(size) < 1:
        raise ValueError(f"grid must be 14 or 14x28, or several with commas; got {text!r}")
    return size


def _sides(text: str) -> tuple[int, int]:
    sides = re.fullmatch(r"(\d+)(?:x(\d+))?", text)
    return (int(sides[1]), int(sides[2] or sides[1])) if sides else (0, 0)


def number(key: str, text: str, least: int = 1) -> int:
    """A whole number out of an option.

    Raises:
        ValueError: It is none, or below ``least``.
    """
    if not text.isdecimal() or int(text) < least:
        raise ValueError(f"{key} must be a whole number from {least} up; got {text!r}")
    return int(text)


def select(text: str) -> list[str]:
    """Registered names out of names and patterns with commas between them."""
    from tools.command_line.catalogue import catalogue

    known, names = catalogue(), []
    for item in text.split(","):
        found = known.list_backbones(item)
        if not found and any(sign in item for sign in "*?["):
            raise ValueError(f"no backbone matches {item!r}; 'swin_*' or '*_afbo' are patterns")
        # Refuses an unknown name with the nearest ones, and knows names that are not listed.
        names += found or [known.schema(item)["name"]]
    return list(dict.fromkeys(names))
