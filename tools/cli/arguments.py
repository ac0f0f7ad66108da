"""Parse ``key=value`` arguments: options, image sizes, integers and patterns of names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence

from backbones.options import shortened
from tasks.engine.family import Family
from tools.cli.catalogue import catalogue

DIGITS = 19  # of the largest integer that torch takes
# Options of backbones that users often type without the prefix "backbone.".
BACKBONE_OPTIONS = ("mixer", "token_mixer", "drop_path_rate", "img_size")


def parse_options(
    arguments: Sequence[str],
    defaults: Mapping[str, str],
    choices: Mapping[str, Sequence[str]],
    more: str = "",
    *,
    takes_backbone: bool = False,
) -> dict[str, str]:
    """Parse ``key=value`` arguments into options with defaults.

    Args:
        arguments: The command line, without the command.
        defaults: Every known key with its default.
        choices: The valid values of options that have a closed list.
        more: Further arguments of the command, for the error message.
        takes_backbone: The command takes ``backbone.OPTION`` too, which it has parsed already.

    Raises:
        An argument is unknown, lacks its value, or is not one of the choices.
    """
    options = dict(defaults)
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if key not in options or not equals or not value:
            near = difflib.get_close_matches(key, options, n=1) if key not in options else []
            hint = f" (did you mean {near[0]}=?)" if near else ""
            if takes_backbone and key.partition(".")[0] in BACKBONE_OPTIONS:
                hint = f" (did you mean backbone.{argument}?)"
            more_keys = "backbone.OPTION" if takes_backbone else more
            raise ValueError(
                f"cannot use {argument!r}{hint}; arguments are key=value, with the keys "
                f"{', '.join(options)}{f' and {more_keys}' if more_keys else ''}; see --help"
            )
        options[key] = value
    for key, valid in choices.items():
        if options.get(key) and options[key] not in valid:
            raise ValueError(f"{key} must be one of {', '.join(valid)}; got {options[key]!r}")
    return options


def parse_image_size(text: str, usual: int = 224) -> tuple[int, int]:
    """Parse ``224`` or ``800x1280`` to (H, W); an empty text means ``usual``."""
    expected = "image_size must be 224 or 800x1280, from 64 up (32 with patch_size)"
    return _parse_sides(text or str(usual), 32, expected)


def parse_grid(text: str) -> tuple[int, int]:
    """Parse ``14`` or ``14x28`` to (H, W)."""
    return _parse_sides(text, 1, "grid must be 14 or 14x28, or several separated by commas")


def _parse_sides(text: str, least: int, expected: str) -> tuple[int, int]:
    sides = re.fullmatch(r"(\d{1,9})(?:x(\d{1,9}))?", text)
    size = (int(sides[1]), int(sides[2] or sides[1])) if sides else (0, 0)
    if min(size) < least:
        raise ValueError(f"{expected}; got {shortened(text)!r}")
    return size


def parse_integer(key: str, text: str, least: int = 1) -> int:
    """Parse a whole number.

    Raises:
        ValueError: The text is not a whole number, or below ``least``.
    """
    if text.isdecimal() and len(text) < DIGITS and least <= int(text):
        return int(text)
    raise ValueError(f"{key} must be a whole number from {least} up; got {shortened(text)!r}")


def select_backbones(text: str, family: Family | None = None) -> list[str]:
    """List the registered names that comma-separated names and patterns stand for.

    Args:
        text: As typed.
        family: Task family of the networks; patterns skip those of another modality.

    Raises:
        ValueError: A name is unknown, or of another modality than the family's.
    """
    registered, names = catalogue(), []
    for item in text.split(","):
        matches = registered.list_backbones(item, family.modality if family else "")
        if not matches and any(sign in item for sign in "*?["):
            raise ValueError(f"no backbone matches {item!r}; 'swin_*' or '*_afbo' are patterns")
        # Raises for an unknown name with the nearest ones, and accepts names that are not listed.
        names += matches or [registered.schema(item)["name"]]
        if family and not matches:
            hosts = registered.hosts_for(family.modality)
            family.check_host(names[-1], registered.modality(names[-1]), hosts)
    return list(dict.fromkeys(names))
