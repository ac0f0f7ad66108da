"""Standard streams that survive being closed or full: lines are lost, the program continues."""

from __future__ import annotations

import io
import os
import sys
from typing import Any


class LossyFile(io.FileIO):
    """File of a standard stream that drops what cannot be written."""

    def write(self, data: Any, /) -> int:
        """Write bytes, or drop them."""
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def protect_streams() -> None:
    """Replace closed standard streams by the null device, and drop lines that a full one rejects.

    Without this, the next opened files would get the numbers of the closed streams and receive the
    output of libraries. Characters that a stream cannot encode are escaped.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
    for number, name in enumerate(("stdout", "stderr"), start=1):
        stream = getattr(sys, name)
        encoding = "utf-8" if stream is None else stream.encoding  # None if it was closed
        file = io.BufferedWriter(LossyFile(number, "wb", closefd=False))
        lossy = io.TextIOWrapper(file, encoding, "backslashreplace", line_buffering=True)
        setattr(sys, name, lossy)
