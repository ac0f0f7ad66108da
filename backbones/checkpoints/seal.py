"""Seal of a checkpoint: version and format of its writer, and a checksum."""

from __future__ import annotations

import importlib.metadata
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

KEY = "mixerlab"
FORMAT = 1  # raise it if older versions cannot resume correctly from a new file


class DamagedCheckpoint(ValueError):
    """File that differs from what was written; an earlier checkpoint may be intact."""


def seal(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content with its format, version and checksum under ``mixerlab``."""
    content = {key: value for key, value in content.items() if key != KEY}
    try:
        version = importlib.metadata.version("mixerlab")
    except importlib.metadata.PackageNotFoundError:
        version = "unknown"
    return {**content, KEY: {"format": FORMAT, "version": version, "crc32": checksum(content)}}


def verify(content: object, path: object) -> None:
    """Compare a content with its seal; files of other tools and our first ones lack it.

    Args:
        content: After ``schema.check_parts``.
        path: The file.

    Raises:
        DamagedCheckpoint: The checksum differs.
    """
    if not isinstance(content, Mapping) or KEY not in content:
        return
    rest = {key: value for key, value in content.items() if key != KEY}
    if checksum(rest) != content[KEY].get("crc32"):
        raise DamagedCheckpoint(
            f"{path} is damaged: its checksum differs from its content's; pass another checkpoint "
            f"of the run, or copy it again (if you changed the file, remove its entry {KEY!r})"
        )


def checksum(value: object, start: int = 0) -> int:
    """Return the CRC-32 of tensors and plain values in order, equal before and after saving."""
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
