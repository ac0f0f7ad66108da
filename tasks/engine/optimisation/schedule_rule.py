"""Default schedule of a family by the size of its training set, for options typed as ``auto``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Options that may be ``auto``.
SCALE = "data.scale"
BATCH, RATE, REFERENCE = "data.batch_size", "optimizer.lr", "optimizer.reference_batch"
WARMUP, MILESTONES = "schedule.warmup", "schedule.milestones"
EPOCHS, STEPS = "trainer.max_epochs", "trainer.max_steps"
INTERVAL = "trainer.check_val_every_n_epoch"
KEYS = (SCALE, BATCH, RATE, WARMUP, MILESTONES, EPOCHS, INTERVAL)

# Starts of a training; a network whose only norms are batch norms bears higher rates.
RANDOM, BATCH_NORM = "random weights", "random weights, batch norms only"
PRETRAINED = "pretrained weights"


@dataclass(frozen=True)
class ScheduleRule:
    """Default schedule of a family for N training examples.

    Attributes:
        batches: Largest N, and examples per step over all devices up to it.
        device_batch: Examples per step on one device for larger N, and the maximum for all.
        rates: Learning rate and its batch by the start of the training. With more examples per
            step the rate stays, with fewer it falls with the square root of their number.
        seen: A run has ``seen / sqrt(N)`` epochs, so that it sees ``seen * sqrt(N)`` examples.
        least_epochs: Of N, the least number of epochs.
        warmup_steps: The longest warm-up.
        fixed: Published schedule by option, for recipes and experiments that leave it open.
        large: Largest N for these batches; beyond it they are ``large_batch``, since long runs
            want lower rates.
        large_batch: See ``large``.

    Source of the square root: Malladi et al., "On the SDEs and Scaling Rules for Adaptive Gradient
    Algorithms", 2022; the linear rule is SGD's.
    """

    batches: tuple[tuple[int, int], ...]
    device_batch: int
    rates: Mapping[str, tuple[float, int]]
    seen: float
    least_epochs: Callable[[int], float]
    warmup_steps: float
    fixed: Mapping[str, Any]
    large: float = math.inf
    large_batch: int = 0


def rates_by_start(
    random: tuple[float, int],
    pretrained: tuple[float, int],
    batch_norm: tuple[float, int] | None = None,
) -> dict[str, tuple[float, int]]:
    """Return ``rates`` of a rule; without ``batch_norm`` such networks start like others."""
    norms = {} if batch_norm is None else {BATCH_NORM: batch_norm}
    return {RANDOM: random, PRETRAINED: pretrained, **norms}


def published_schedule(
    *,
    batch: int,
    rate: float,
    reference: int,
    warmup: float,
    epochs: int,
    milestones: Sequence[int] | None = None,
    scale: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Return ``fixed`` of a rule, with a validation after each epoch."""
    values: dict[str, Any] = {
        BATCH: batch, RATE: rate, REFERENCE: reference, WARMUP: warmup, EPOCHS: epochs, INTERVAL: 1,
    }  # fmt: skip
    values |= {} if milestones is None else {MILESTONES: list(milestones)}
    return values | ({} if scale is None else {SCALE: list(scale)})
