"""Markdown tables and blocks for generated pages."""

from __future__ import annotations

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
    """Return a docstring's prose as Markdown: code in single backticks, no stray emphasis."""
    text = text.replace("``", "`")
    parts = text.split("`")
    parts[::2] = [
        part.replace("*", "\\*").replace("_", "\\_").replace("<", "\\<") for part in parts[::2]
    ]
    return "`".join(parts)
