"""Exchange Python objects between the processes of a run, and errors that end all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def gather_objects(value: T) -> list[T]:
    """One entry per process, in rank order; a list of one where there is one process."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, value)
    return parts


def process_group() -> tuple[int, int]:
    """Return the rank of this process and the number of processes."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def refuse_together(problem: str | None) -> None:
    """End all processes of a run for what any of them has found; all have to call it.

    One that went alone would leave the others waiting for it.

    Args:
        problem: Message of this process, or None.

    Raises:
        ValueError: In the first process, with the first problem.
        SystemExit: In the others, without a message.
    """
    problems = gather_objects(problem)
    for rank, message in enumerate(problems):
        if message is None:
            continue
        if len(problems) > 1 and dist.get_rank() > 0:
            raise SystemExit(2)
        raise ValueError(f"process {rank} of the run: {message}" if rank else message)


def mean_over_processes(strategy: Any, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the mean of each scalar over the processes of a trainer's strategy."""
    stacked = torch.stack([value.float() for value in values.values()])
    means = strategy.reduce(stacked, reduce_op="mean")
    return dict(zip(values, means.unbind(), strict=True))
