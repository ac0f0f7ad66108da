"""Text of files and of names as terminals may show it."""

from __future__ import annotations

import io
import logging
import re
import sys

LONGEST = 8_000  # characters of one message
# Control characters but for tab and line feed, and those that reverse the order of letters.
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str, longest: int = LONGEST) -> str:
    """Return a text with its control characters escaped, cut where it is too long."""
    shown = text if len(text) <= longest else f"{text[:longest]}... ({len(text):,} characters)"
    return CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), shown)


class PrintableFormatter(logging.Formatter):
    """Escapes and cuts what a log says."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a record."""
        return printable(super().format(record))


def escape_logs() -> None:
    """Let the handlers of the root logger, which print bare messages, print no control codes."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(PrintableFormatter("%(message)s"))


def escape_undecodable() -> None:
    """Escape characters that the output streams cannot encode, such as those of file names."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
