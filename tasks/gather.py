"""Python objects of all processes, in every process."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def gather_objects(value: T) -> list[T]:
    """One entry per process, in rank order; a list of one where there is one process."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, value)
    return parts
