"""Standard streams that may be closed or full: what cannot be printed costs the lines only."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

STREAMS = ("stdin", "stdout", "stderr")


class LossyFile(io.FileIO):
    """The file of a standard stream, which drops what cannot be written.

    Attributes:
        failure: The first error; None as long as all was written.
    """

    failure: OSError | None = None

    def write(self, data: Any, /) -> int:
        """Write bytes, or drop them."""
        try:
            return super().write(data)
        except OSError as error:
            self.failure = self.failure or error
            return memoryview(data).nbytes


def protect_streams() -> None:
    """Give closed standard streams the null device, and let full ones drop their lines.

    The next files that a program opens would take the numbers of closed streams, and would get the
    lines of libraries.
    """
    for number, _ in enumerate(STREAMS):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    for number, name in enumerate(STREAMS[1:], start=1):
        stream = getattr(sys, name)
        # Another stream is one of the program's own making, as in a test.
        if stream is getattr(sys, f"__{name}__") and not _is_lossy(stream):
            setattr(sys, name, _lossy(number, stream))
            setattr(sys, f"__{name}__", getattr(sys, name))


def lost_output() -> str | None:
    """Return why lines of standard output were lost, or None if all were written."""
    stream: Any = sys.stdout
    if not _is_lossy(stream):
        return None
    stream.flush()
    failure: OSError | None = stream.buffer.raw.failure
    return None if failure is None else str(failure.strerror or failure)


def _is_lossy(stream: Any) -> bool:
    return isinstance(getattr(getattr(stream, "buffer", None), "raw", None), LossyFile)


def _lossy(number: int, stream: Any) -> io.TextIOWrapper:
    """Return a stream like another one that drops what cannot be written."""
    file = io.BufferedWriter(LossyFile(number, "wb", closefd=False))
    if stream is None:  # it was closed
        return io.TextIOWrapper(file, "utf-8", "backslashreplace", line_buffering=True)
    stream.flush()
    return io.TextIOWrapper(
        file, stream.encoding, stream.errors, line_buffering=stream.line_buffering
    )
