"""Standard streams that survive being closed or full: lines are lost, the program continues."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

STREAMS = ("stdin", "stdout", "stderr")


class LossyFile(io.FileIO):
    """File of a standard stream that drops what cannot be written.

    Attributes:
        failure: The first error, or None.
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
    """Replace closed standard streams by the null device, and drop lines that a full one rejects.

    Without this, the next opened files would get the numbers of the closed streams and receive the
    output of libraries.
    """
    for number, _ in enumerate(STREAMS):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
    for number, name in enumerate(STREAMS[1:], start=1):
        stream = getattr(sys, name)
        # Any other stream was set by the program, such as by a test.
        if stream is getattr(sys, f"__{name}__") and not _is_lossy(stream):
            setattr(sys, name, _make_lossy(number, stream))
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


def _make_lossy(number: int, stream: Any) -> io.TextIOWrapper:
    """Return a stream with the same encoding that drops what cannot be written."""
    file = io.BufferedWriter(LossyFile(number, "wb", closefd=False))
    if stream is None:  # it was closed
        return io.TextIOWrapper(file, "utf-8", "backslashreplace", line_buffering=True)
    stream.flush()
    return io.TextIOWrapper(
        file, stream.encoding, stream.errors, line_buffering=stream.line_buffering
    )
