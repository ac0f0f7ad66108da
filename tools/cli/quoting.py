"""Quote arguments so that Hydra reads them exactly as typed.

The shell has already removed its own quotes. Hydra's grammar would read the signs ``=[],`` and
quotes in a path as lists, sweeps or calls, and reject accents.
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

# Options that are paths; their values are always texts.
PATHS = re.compile(
    r"ckpt|input|output_dir|backbone\.pretrained|task\.distillation\.checkpoint|"
    r"data\.(root|roots\.\w+|token_labels|\w+_(annotations|images|masks|folder|list|labels|file))"
)
KEY = re.compile(r"(~|\+{0,2})[\w@:./$-]*", re.ASCII)
WORDS = ("", "null", "true", "false")  # left as they are
CALL = re.compile(r"(choice|range|interval|glob|shuffle|sort|tag|extend_list)\(.*\)", re.DOTALL)
# The delimiters of lists and dictionaries, and quoted texts.
DELIMITERS = re.compile(r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[\[\]{},:])""")


def quote_arguments(arguments: Sequence[str], *, sweep: bool = False) -> list[str]:
    """Quote a command's arguments so that Hydra reads them as typed.

    Args:
        arguments: As the shell passed them.
        sweep: Several values separated by commas are allowed.

    Raises:
        ValueError: An argument cannot be expressed; the message shows what to type.
    """
    return [
        argument
        if argument.startswith("-") or argument.lstrip("+~").startswith("hydra")
        else _quote_argument(argument, sweep)
        for argument in arguments
    ]


def _quote_argument(argument: str, sweep: bool) -> str:
    key, equals, value = argument.partition("=")
    if not KEY.fullmatch(key):
        raise ValueError(
            f"{key!r} is not an option name; options are key=value, and a key has letters from a "
            "to z"
        )
    if not equals:
        if _parse(argument) is None:
            raise ValueError(f"cannot use {argument!r}; arguments are key=value")
        return argument
    if PATHS.fullmatch(key.lstrip("+")):
        return f"{key}={_quote_path(value, sweep)}"
    if _parse(argument) is not None:
        return argument
    for form in (_quote_items(value), quote(value)):
        if _parse(f"{key}={form}") is not None:
            return f"{key}={form}"
    raise ValueError(
        f"cannot read {argument}; for a text type {shlex.quote(f'{key}={quote(value)}')}"
    )


def _quote_path(value: str, sweep: bool) -> str:
    if value in WORDS or CALL.fullmatch(value) or _is_quoted(value):
        return value
    if sweep and "," in value and not Path(value).expanduser().exists():
        return ",".join(_quote_path(path, sweep=False) for path in value.split(","))
    parsed = _parse(f"key={value}")
    if parsed is not None and not parsed.is_sweep_override() and parsed.value() == value:
        return value
    return quote(value)


def _is_quoted(value: str) -> bool:
    """Return True for one or several comma-separated texts in Hydra's quotes."""
    parts = DELIMITERS.split(value)
    texts, rest = parts[1::2], parts[::2]
    return any(part[0] in "'\"" for part in texts) and not any(rest) and set(texts[1::2]) <= {","}


def _parse(argument: str) -> Any:
    try:
        return OverridesParser.create().parse_override(argument)
    except HydraException:
        return None


def quote(text: str) -> str:
    """Return a text in Hydra's quotes."""
    return QuotedString(text=text, quote=Quote.single).with_quotes()


def _quote_items(value: str) -> str:
    """Quote the items of lists, dictionaries and sweeps that Hydra cannot read."""
    parts = DELIMITERS.split(value)
    for place in range(0, len(parts), 2):
        word = parts[place].strip()
        if word and _parse(f"key={word}") is None:
            parts[place] = parts[place].replace(word, quote(word))
    return "".join(parts)
