"""Meanings of options, read from docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any


def summary(build: Callable[..., Any]) -> str:
    """Return the first line of a docstring as a noun phrase: "Build an FFN." is "An FFN."."""
    line = (inspect.getdoc(build) or "").partition("\n")[0]
    built = line.removeprefix("Build ")
    return line if built == line else built[:1].upper() + built[1:]


def meanings(*builders: Callable[..., Any]) -> dict[str, str]:
    """Return the descriptions of arguments in docstrings, by name; later docstrings win."""
    texts: dict[str, str] = {}
    for build in builders:
        section = re.search(
            r"^Args:\n(.*?)(?=^\S|\Z)",
            (inspect.getdoc(build) or "") + "\n",
            re.DOTALL | re.MULTILINE,
        )
        names: list[str] = []
        for line in section[1].splitlines() if section else ():
            entry = re.match(r" {4}\**(\w+(?:, \w+)*): (.*)", line)
            if entry:
                names = entry[1].split(", ")
                texts |= dict.fromkeys(names, entry[2])
            else:
                texts |= {name: f"{texts[name]} {line.strip()}".strip() for name in names}
    return texts
