"""Optimisers and learning-rate schedules, by the names and rules of the papers' recipes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}


def without_decay(model: nn.Module) -> frozenset[str]:
    """Names of the parameters that weight decay leaves alone.

    These are vectors and scalars (norms, biases, layer scales) and what the backbone's authors
    name, as in timm, DeiT and Swin. To be asked before a strategy shards and flattens parameters.
    """
    chosen: set[nn.Parameter] = set()
    backbone = getattr(model, "backbone", None)
    if backbone is not None:
        names = backbone.no_weight_decay
        chosen = {p for name, p in backbone.named_parameters() if name in names}
    parameters = model.named_parameters()
    return frozenset(name for name, p in parameters if p.ndim <= 1 or p in chosen)


def param_groups(
    model: nn.Module, weight_decay: float, exempt: Collection[str] | None = None
) -> list[dict[str, Any]]:
    """Split the trainable parameters into decayed ones and the others.

    Args:
        model: With its ``backbone``, if it has one.
        weight_decay: Of the decayed ones.
        exempt: Names of the others; None stands for ``without_decay(model)``.
    """
    exempt = without_decay(model) if exempt is None else exempt
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for name, p in trained if name not in exempt], "weight_decay": weight_decay},
        {"params": [p for name, p in trained if name in exempt], "weight_decay": 0.0},
    ]


def build_optimizer(
    model: nn.Module,
    exempt: Collection[str] | None = None,
    *,
    name: str,
    lr: float,
    weight_decay: float = 0.0,
    **options: Any,
) -> torch.optim.Optimizer:
    """Build "adamw" or "sgd" over the trainable parameters.

    Args:
        model: Its frozen parameters get no optimiser state.
        exempt: Names of its parameters that are not decayed; see ``param_groups``.
        name: One of ``OPTIMIZERS``.
        lr: Learning rate at the top of the schedule.
        weight_decay: Of the other parameters.
        **options: torch's own, such as ``betas`` or ``momentum``.

    Raises:
        ValueError: Unknown name or option, or a value out of range.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"optimizer.name must be one of {', '.join(OPTIMIZERS)}, got {name!r}")
    _refuse(lr <= 0, f"optimizer.lr must be above 0, got {lr}")
    _refuse(weight_decay < 0, f"optimizer.weight_decay must not be below 0, got {weight_decay}")
    known = inspect.signature(OPTIMIZERS[name]).parameters.keys() - {"params"}
    unknown = sorted(options.keys() - known)
    _refuse(bool(unknown), f"{name} has no option {unknown}; it has {sorted(known)}")
    try:
        return OPTIMIZERS[name](param_groups(model, weight_decay, exempt), lr=lr, **options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} refuses its options {options}: {error}") from error


def learning_rate_factor(
    steps: int,
    steps_per_epoch: int,
    *,
    name: str,
    warmup: float = 0.0,
    warmup_start: float = 1e-3,
    min_lr_ratio: float = 0.0,
    milestones: Sequence[float] = (),
    gamma: float = 0.1,
    power: float = 1.0,
) -> Callable[[int], float]:
    """Make the function that gives the learning rate of each optimiser step over the top rate.

    Args:
        steps: Optimiser steps of the whole run.
        steps_per_epoch: Optimiser steps of one epoch.
        name: "cosine", "poly", "multistep" or "constant".
        warmup: Epochs of linear warm-up; they are part of the run.
        warmup_start: First rate over the top rate.
        min_lr_ratio: Last rate over the top rate, for cosine and poly.
        milestones: Epochs at which "multistep" multiplies the rate by ``gamma``.
        gamma: See ``milestones``.
        power: Exponent of "poly".

    Raises:
        ValueError: Unknown name, or a value out of range.
    """
    shapes: dict[str, Callable[[float], float]] = {
        "cosine": lambda t: min_lr_ratio + (1 - min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * t)),
        "poly": lambda t: min_lr_ratio + (1 - min_lr_ratio) * (1 - t) ** power,
        "constant": lambda t: 1.0,
    }
    names = [*shapes, "multistep"]
    _refuse(name not in names, f"schedule.name must be one of {', '.join(names)}, got {name!r}")
    _refuse(warmup < 0, f"schedule.warmup must not be below 0, got {warmup}")
    for option, value in (("warmup_start", warmup_start), ("min_lr_ratio", min_lr_ratio)):
        _refuse(not 0 <= value <= 1, f"schedule.{option} must be from 0 to 1, got {value}")
    warmup_steps = round(warmup * steps_per_epoch)

    def factor(step: int) -> float:
        if step < warmup_steps:
            return warmup_start + (1 - warmup_start) * step / warmup_steps
        if name == "multistep":
            epoch = step / steps_per_epoch
            return float(gamma ** sum(epoch >= milestone for milestone in milestones))
        return shapes[name](min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps)))

    return factor


def _refuse(wrong: bool, message: str) -> None:
    if wrong:
        raise ValueError(message)
