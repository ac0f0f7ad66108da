"""Markdown tables and blocks for generated pages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table; cells may hold Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(value: object) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")


def code(text: str, language: str = "text") -> str:
    """Return a code block."""
    return f"```{language}\n{text.strip()}\n```"


def prose(text: str) -> str:
    """Return a docstring's prose as Markdown: code in backticks, links, plain characters."""
    parts = text.replace("``", "`").split("`")
    parts[::2] = [_plain(part) for part in parts[::2]]
    return "`".join(parts)


def _plain(text: str) -> str:
    words = re.split(r"(https?://[^\s,;)]*[^\s,;).])", text)
    words[::2] = [re.sub(r"([*_<])", r"\\\1", word) for word in words[::2]]
    words[1::2] = [f"<{word}>" for word in words[1::2]]
    return "".join(words)
