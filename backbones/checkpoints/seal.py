"""The seal of a checkpoint: the version and format it was written in, and a checksum."""

from __future__ import annotations

import importlib.metadata
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

KEY = "mixerlab"
FORMAT = (
    1  # To be raised when an older version could not go on from a file, or would do so wrongly.
)


class DamagedCheckpoint(ValueError):
    """A file that is not, or no longer, what was written; an earlier one may still be good."""


def seal(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content, and under ``mixerlab`` its format, version and checksum."""
    content = {key: value for key, value in content.items() if key != KEY}
    try:
        version = importlib.metadata.version("mixerlab")
    except importlib.metadata.PackageNotFoundError:
        version = "unknown"
    return {**content, KEY: {"format": FORMAT, "version": version, "crc32": checksum(content)}}


def verify(content: object, path: object) -> None:
    """Compare a content with its seal; files of others have none, nor have our first ones.

    Args:
        content: After ``schema.check_parts``.
        path: The file.

    Raises:
        DamagedCheckpoint: The content is not that which was sealed.
    """
    if not isinstance(content, Mapping) or KEY not in content:
        return
    rest = {key: value for key, value in content.items() if key != KEY}
    if checksum(rest) != content[KEY].get("crc32"):
        raise DamagedCheckpoint(
            f"{path} is damaged: its checksum is not that of its content; pass another checkpoint "
            f"of the run, or copy it again (one that you changed yourself needs no entry {KEY!r})"
        )


def checksum(value: object, start: int = 0) -> int:
    """CRC-32 of tensors and plain values in their order, as it is before and after saving."""
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        start = zlib.crc32(f"{value.dtype}{tuple(value.shape)}".encode(), start)
        return zlib.crc32(flat.numpy().data, start) if flat.numel() else start
    if isinstance(value, Mapping):
        start = zlib.crc32(f"mapping of {len(value)}".encode(), start)
        for key, item in value.items():
            start = checksum(item, zlib.crc32(repr(key).encode(), start))
        return start
    if isinstance(value, list | tuple):
        start = zlib.crc32(f"sequence of {len(value)}".encode(), start)
        for item in value:
            start = checksum(item, start)
        return start
    return zlib.crc32(repr(value).encode(), start)
