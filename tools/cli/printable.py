"""Make any text safe to print on a terminal."""

from __future__ import annotations

import logging
import re

from tools.cli.paths import ROOT

MAX_CHARACTERS = 8_000  # characters of one message
# Control characters except tab and line feed, and marks that reverse the direction of text.
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

COMMAND = re.compile(r"(?:python )?\btools/(\w+)\.py")


def printable(text: str, longest: int = MAX_CHARACTERS) -> str:
    """Escape the control characters of a text, and cut it to ``longest`` characters."""
    excerpt = text if len(text) <= longest else f"{text[:longest]}... ({len(text):,} characters)"
    return CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), excerpt)


def as_typed(text: str) -> str:
    """Write each ``python tools/run.py`` of a text as ``mixerlab run`` where that is installed."""
    return text if (ROOT / "Makefile").exists() else COMMAND.sub(r"mixerlab \1", text)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: "1 cell", "2 cells"."""
    return f"{number} {noun}{'s' * (number != 1)}"


class PrintableFormatter(logging.Formatter):
    """Log formatter that escapes and cuts messages."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record."""
        return printable(super().format(record))


def escape_logs() -> None:
    """Escape control characters in all messages of the root logger's handlers."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(PrintableFormatter("%(message)s"))
