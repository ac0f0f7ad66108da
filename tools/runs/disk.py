"""A check that the checkpoints of a training fit on its disk, before it begins."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tasks.engine.base import BaseTask
from tasks.engine.optimisation.optimizer import SCHEDULE_FREE, build_optimizer
from tasks.engine.optimisation.param_groups import RULES

MIB = 2**20
RESERVE = 16 * MIB  # for logs, pictures and what lies beside the tensors


def check_space(folder: Path, task: BaseTask, *, top_k: int = 0) -> None:
    """Refuse a training if its checkpoints exceed the free space or the limit of a file's size.

    While last.ckpt is written, it lies beside the two before it.

    Args:
        folder: Run folder.
        task: The model with the options of its optimiser.
        top_k: The option ``callbacks.top_k``.

    Raises:
        ValueError: Names the sizes, and the folder or the limit.
    """
    weights, state = checkpoint_sizes(task)
    total = 3 * (weights + state) + (1 + top_k) * weights + RESERVE
    files = sum(path.stat().st_size for path in folder.glob("checkpoints/*.ckpt") if path.is_file())
    room = shutil.disk_usage(folder).free
    if total > room + files:
        raise ValueError(
            f"{folder} has {_size(room)} of free space, but the checkpoints of this training take "
            f"up to {_size(total - files)} more ({_size(weights + state)} each with the "
            "optimiser's state); free space, or pass output_dir=<a folder on another disk>"
        )
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY and weights + state > limit:
        raise ValueError(
            f"a checkpoint of this training takes {_size(weights + state)}, but files are limited "
            f"to {_size(limit)} (ulimit -f); raise the limit"
        )


def checkpoint_sizes(task: BaseTask) -> tuple[int, int]:
    """Return the bytes of the weights with their average, and of the optimiser's state."""
    weights = _bytes(task.state_dict().values())
    if task.ema is not None or task.optimizer_options["name"] in SCHEDULE_FREE:
        averaged = (v for v in task.model.state_dict().values() if isinstance(v, Tensor))
        weights += sum(value.numel() * max(4, value.element_size()) for value in averaged)
    trained = _bytes(p for p in task.parameters() if p.requires_grad)
    return weights, int(trained * _state_share(task.optimizer_options))


def _state_share(options: Mapping[str, Any]) -> float:
    """Return the bytes that an optimiser keeps for each byte of a parameter, from a step of one."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(8, 8))
    choices = {key: value for key, value in options.items() if key not in RULES}
    optimizer = build_optimizer(model, **choices)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    state = (value for values in optimizer.state.values() for value in values.values())
    state_bytes = _bytes(
        v for v in state if isinstance(v, Tensor) and v.shape == model.weight.shape
    )
    return state_bytes / model.weight.nbytes


def _bytes(tensors: Iterable[Any]) -> int:
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))


def _size(count: float) -> str:
    return f"{count / MIB:,.0f} MiB"
