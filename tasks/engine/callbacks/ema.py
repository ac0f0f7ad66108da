"""Averages of a model's weights, for evaluation and use.

Lightning's ``EMAWeightAveraging`` averages in the weights' own precision, reports the average alone
and stores it under other names than the checkpoints of earlier runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

MAX_SHARE_OF_START = 0.05  # maximum share of the initial weights in the final average


class WeightEMA:
    """Exponential moving average of a model's weights.

    After every step average <- d average + (1 - d) weights; the first step copies the weights.
    Running statistics are averaged like weights, counters are copied. The tensors are created on
    the model's device at the first step, in float32 or wider, since an average in half precision
    would stall.

    Args:
        decay: d, in [0, 1).
        warmup: Begin with a smaller d, 1 - (1 + t)^(-2/3) at step t, so that a short run forgets
            its initial weights.
        report: Weights that validation, tests and loaders use: "average", or "best", the better of
            weights and average in the last validation, as FFNet's authors do.

    Attributes:
        is_reported: True if the average is reported, False if the weights are.

    Source: the arithmetic of timm's ``ModelEmaV3``, averages of buffers included.
    """

    def __init__(
        self,
        *,
        decay: float = 0.9999,
        warmup: bool = False,
        report: Literal["average", "best"] = "average",
    ) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"task.ema.decay must be from 0 to below 1, got {decay}")
        self.decay, self.warmup, self.report = decay, warmup, report
        self.is_reported = True
        self.steps = 0
        self.tensors: dict[str, Tensor] = {}
        self._live: dict[str, Tensor] = {}

    def decay_warning(self, steps: int) -> str | None:
        """Return a warning if a run of ``steps`` is too short for the decay, else None."""
        share = self.decay ** max(0, steps - 1)  # of the initial weights
        if self.warmup or self.report == "best" or share <= MAX_SHARE_OF_START:
            return None
        decay = max(0.0, 1 - 10 / steps)  # averages about the last tenth of the run
        return (
            f"task.ema.decay={self.decay:g} is slow for {steps} steps: validation and tests see "
            f"the average, {share:.0%} of which is still the initial weights at the end; pass "
            f"task.ema.decay={decay:.4g} or task.ema.warmup=true"
        )

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Update the average after an optimiser step."""
        state = _tensors(model)
        if not self.tensors:
            self.tensors = {key: _in_float32(value).clone() for key, value in state.items()}
        # After loading a checkpoint they may be on another device.
        self.tensors = {key: value.to(state[key].device) for key, value in self.tensors.items()}
        decay = self.decay
        if self.warmup:
            decay = min(decay, 1 - (1 + self.steps) ** (-2 / 3))
        self.steps += 1
        averaged = [key for key, value in self.tensors.items() if value.is_floating_point()]
        ema = [self.tensors[key] for key in averaged]
        torch._foreach_lerp_(ema, [state[key].to(self.tensors[key]) for key in averaged], 1 - decay)
        for key in self.tensors.keys() - set(averaged):
            self.tensors[key].copy_(state[key])

    @torch.no_grad()
    def swap_in(self, model: nn.Module) -> None:
        """Swap the average, if any, into the model; ``swap_out`` undoes it."""
        if self.tensors:
            state = _tensors(model)
            self._live = {key: value.clone() for key, value in state.items()}
            _copy(self.tensors, state)

    @torch.no_grad()
    def swap_out(self, model: nn.Module) -> None:
        """Restore the weights that ``swap_in`` replaced."""
        if self._live:
            _copy(self._live, _tensors(model))
            self._live = {}

    @contextmanager
    def applied_to(self, model: nn.Module) -> Iterator[None]:
        """Swap the average in, as a context manager."""
        self.swap_in(model)
        try:
            yield
        finally:
            self.swap_out(model)

    def state_dict(self) -> dict[str, Any]:
        """Return the tensors and the number of steps for a checkpoint."""
        return {"tensors": dict(self.tensors), "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any], model: nn.Module) -> None:
        """Restore what ``state_dict`` returned.

        Raises:
            ValueError: The average belongs to another model.
        """
        tensors = _tensors(model)
        if tensors.keys() != state["tensors"].keys():
            raise ValueError("the checkpoint's average belongs to another model; start a new run")
        self.tensors = {key: value.clone() for key, value in state["tensors"].items()}
        self.steps = int(state["steps"])


class ScheduleFreeAverage(WeightEMA):
    """Average of the weights that a schedule-free optimiser computes.

    The optimiser trains weights y and reports their average x. Reading x leaves y bit-equal, so
    that validations and checkpoints leave the training unchanged.

    Args:
        optimizer: One of ``optim.SCHEDULE_FREE``.
        model: The model that it trains.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        self._optimizer: Any = optimizer
        self._model = model
        super().__init__()
        self._outdated = True

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Return the model's state with averaged weights."""
        if self._outdated:
            self._outdated = False
            self._average = self._read()
        return self._average

    @tensors.setter
    def tensors(self, tensors: dict[str, Tensor]) -> None:
        self._outdated, self._average = False, tensors

    def decay_warning(self, steps: int) -> str | None:
        """Return None, since the average suits any number of steps."""
        return None

    def update(self, model: nn.Module) -> None:
        """Note an optimiser step."""
        self.steps += 1
        self._outdated = True

    @torch.no_grad()
    def _read(self) -> dict[str, Tensor]:
        state = _tensors(self._model)
        live = {key: value.clone() for key, value in state.items()}
        self._optimizer.eval()
        average = {key: value.clone() for key, value in state.items()}
        # The optimiser's train() would change the last bits.
        _copy(live, state)
        for group in self._optimizer.param_groups:
            group["train_mode"] = True
        return average


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    state = model.state_dict()
    return {key: value for key, value in state.items() if isinstance(value, Tensor)}


def _in_float32(value: Tensor) -> Tensor:
    small = value.is_floating_point() and value.element_size() < 4
    return value.float() if small else value


def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    for key, value in target.items():
        value.copy_(source[key])


def reported(ema: WeightEMA | None, model: nn.Module) -> AbstractContextManager[Any]:
    """Swap the average in, if evaluation reports it, as a context manager."""
    if ema is None or not ema.tensors or not ema.is_reported:
        return nullcontext()
    return ema.applied_to(model)
