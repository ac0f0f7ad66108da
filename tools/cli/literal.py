"""Values as the user typed them, quoted for Hydra where its grammar would read them otherwise.

The shell has taken off its quotes before. So paths with ``=``, accents, brackets, commas or quotes
arrive bare, which Hydra's grammar reads as lists, sweeps and calls, or not at all.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException

# Options that are paths: their values are texts, whatever they look like.
PATHS = re.compile(
    r"ckpt|input|output_dir|backbone\.pretrained|task\.distillation\.checkpoint|"
    r"data\.(root|roots\.\w+|token_labels|\w+_(annotations|images|masks|folder|list|labels|file))"
)
KEY = re.compile(r"(~|\+{0,2})[\w@:./$-]*", re.ASCII)
WORDS = ("", "null", "true", "false")  # that stay what they are
CALL = re.compile(r"(choice|range|interval|glob|shuffle|sort|tag|extend_list)\(.*\)", re.DOTALL)
# The signs of lists and dictionaries, and texts in quotes.
SIGNS = re.compile(r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[\[\]{},:])""")


def literal(arguments: Sequence[str], *, sweep: bool = False) -> list[str]:
    """Arguments of a command in a form that Hydra reads as they were typed.

    Args:
        arguments: Of the command, as the shell passed them.
        sweep: True where several values may be typed with commas between them.

    Raises:
        ValueError: One that has no such form, with the line to type.
    """
    return [
        one
        if one.startswith("-") or one.lstrip("+~").startswith("hydra")
        else _readable(one, sweep)
        for one in arguments
    ]


def _readable(argument: str, sweep: bool) -> str:
    key, equals, value = argument.partition("=")
    if not KEY.fullmatch(key):
        raise ValueError(
            f"{key!r} is not the name of an option; options are typed key=value, with letters from "
            "a to z in the key"
        )
    if not equals:
        if _parsed(argument) is None:
            raise ValueError(f"cannot use {argument!r}; arguments are key=value")
        return argument
    if PATHS.fullmatch(key.lstrip("+")):
        return f"{key}={_path(value, sweep)}"
    if _parsed(argument) is not None:
        return argument
    for form in (_quoted_inside(value), quoted(value)):
        if _parsed(f"{key}={form}") is not None:
            return f"{key}={form}"
    raise ValueError(
        f"{argument} cannot be read; for a text type {shlex.quote(f'{key}={quoted(value)}')}"
    )


def _path(value: str, sweep: bool) -> str:
    if value in WORDS or CALL.fullmatch(value) or _is_quoted(value):
        return value
    if sweep and "," in value and not Path(value).expanduser().exists():
        return ",".join(_path(one, sweep=False) for one in value.split(","))
    parsed = _parsed(f"key={value}")
    if parsed is not None and not parsed.is_sweep_override() and parsed.value() == value:
        return value
    return quoted(value)


def _is_quoted(value: str) -> bool:
    """Return True for one text, or several with commas between them, in Hydra's own quotes."""
    parts = SIGNS.split(value)
    texts, rest = parts[1::2], parts[::2]
    return any(one[0] in "'\"" for one in texts) and not any(rest) and set(texts[1::2]) <= {","}


def _parsed(argument: str) -> Any:
    try:
        return OverridesParser.create().parse_override(argument)
    except HydraException:
        return None


def quoted(text: str) -> str:
    """Return a text in quotes of Hydra's grammar."""
    return QuotedString(text=text, quote=Quote.single).with_quotes()


def _quoted_inside(value: str) -> str:
    """Quote what Hydra does not read among the signs of lists, dictionaries and sweeps."""
    parts = SIGNS.split(value)
    for place in range(0, len(parts), 2):
        word = parts[place].strip()
        if word and _parsed(f"key={word}") is None:
            parts[place] = parts[place].replace(word, quoted(word))
    return "".join(parts)
