"""Optimisers and learning-rate schedules, by the names and rules of the papers' recipes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split trainable parameters into decayed and not decayed ones.

    Vectors and scalars (norms, biases, layer scales) and what the backbone's authors name are not
    decayed, as in timm, DeiT and Swin.
    """
    backbone = getattr(model, "backbone", None)
    exempt: Collection[nn.Parameter] = set()
    if backbone is not None:
        exempt = {p for name, p in backbone.named_parameters() if name in backbone.no_weight_decay}
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (plain if parameter.ndim <= 1 or parameter in exempt else decayed).append(parameter)
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]


def build_optimizer(
    model: nn.Module, *, name: str, lr: float, weight_decay: float = 0.0, **options: Any
) -> torch.optim.Optimizer:
    """Build "adamw" or "sgd" over the trainable parameters.

    Args:
        model: Its frozen parameters get no optimiser state.
        name: One of ``OPTIMIZERS``.
        lr: Learning rate at the top of the schedule.
        weight_decay: For matrices and kernels; see ``param_groups``.
        **options: torch's own, such as ``betas`` or ``momentum``.

    Raises:
        ValueError: Unknown name, or a rate out of range.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"optimizer.name must be one of {sorted(OPTIMIZERS)}, got {name!r}")
    if lr <= 0 or weight_decay < 0:
        raise ValueError(
            f"optimizer.lr must be above 0 and weight_decay not below 0, got {lr}, {weight_decay}"
        )
    return OPTIMIZERS[name](param_groups(model, weight_decay), lr=lr, **options)


def build_schedule(
    optimizer: torch.optim.Optimizer,
    steps: int,
    epochs: int,
    *,
    name: str,
    warmup: float = 0.0,
    warmup_start: float = 1e-3,
    min_lr_ratio: float = 0.0,
    milestones: Sequence[float] = (),
    gamma: float = 0.1,
    power: float = 1.0,
) -> LambdaLR:
    """Build a schedule that is asked at every optimiser step.

    Args:
        optimizer: Whose rates it scales.
        steps: Optimiser steps of the whole run.
        epochs: Epochs of the whole run.
        name: "cosine", "poly", "multistep" or "constant".
        warmup: Epochs of linear warm-up; they are part of the run.
        warmup_start: First rate over the top rate.
        min_lr_ratio: Last rate over the top rate, for cosine and poly.
        milestones: Epochs at which "multistep" multiplies the rate by ``gamma``.
        gamma: See ``milestones``.
        power: Exponent of "poly".

    Raises:
        ValueError: Unknown name, or a warm-up longer than the run.
    """
    shapes: dict[str, Callable[[float], float]] = {
        "cosine": lambda t: min_lr_ratio + (1 - min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * t)),
        "poly": lambda t: min_lr_ratio + (1 - min_lr_ratio) * (1 - t) ** power,
        "multistep": lambda t: gamma ** sum(t * epochs >= milestone for milestone in milestones),
        "constant": lambda t: 1.0,
    }
    if name not in shapes:
        raise ValueError(f"schedule.name must be one of {sorted(shapes)}, got {name!r}")
    if not 0 <= warmup < epochs and warmup:
        raise ValueError(
            f"schedule.warmup must be from 0 to below the {epochs} epochs, got {warmup}"
        )
    warmup_steps = round(steps * warmup / epochs)

    def factor(step: int) -> float:
        if step < warmup_steps:
            return warmup_start + (1 - warmup_start) * step / warmup_steps
        if name == "multistep":
            return shapes[name](step / max(1, steps))
        return shapes[name](min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps)))

    return LambdaLR(optimizer, factor)
