"""An exponential moving average of a model's weights, which is what gets evaluated and used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

MAX_SHARE_OF_START = 0.05  # of the first weights in the average at a run's end


class WeightEMA:
    """average <- d average + (1 - d) weights after every step; the first step copies the weights.

    Running statistics are averaged like weights, counters are copied. The tensors are made on the
    model's device at the first step, in float32 at least: an average in half precision would not
    move.

    Args:
        decay: d, in [0, 1).
        warmup: Begin with a smaller d, 1 - (1 + t)^(-2/3) at step t, so that a short run does not
            remember its start.
        report: Weights that validation, tests and loaders get: "average", or "best", which is the
            better of weights and average in the last validation, as by FFNet's authors.

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

    def slow_for(self, steps: int) -> str | None:
        """Return a warning if a run of so many steps is too short for the decay, else None."""
        share = self.decay ** max(0, steps - 1)  # of the weights after the first step
        if self.warmup or self.report == "best" or share <= MAX_SHARE_OF_START:
            return None
        fitting = max(0.0, 1 - 10 / steps)  # the average of about a tenth of the run
        return (
            f"task.ema.decay={self.decay:g} is slow for {steps} steps: at their end the average, "
            f"which is what validation and tests see, is still {share:.0%} the weights that "
            f"training began with; task.ema.decay={fitting:.4g} or ++task.ema.warmup=true suits"
        )

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Update the average after an optimiser step."""
        state = _tensors(model)
        if not self.tensors:
            self.tensors = {key: _wide(value).clone() for key, value in state.items()}
        # After loading a checkpoint they are where it was read to.
        self.tensors = {key: value.to(state[key].device) for key, value in self.tensors.items()}
        decay = self.decay
        if self.warmup:
            decay = min(decay, 1 - (1 + self.steps) ** (-2 / 3))
        self.steps += 1
        averaged = [key for key, value in self.tensors.items() if value.is_floating_point()]
        own = [self.tensors[key] for key in averaged]
        torch._foreach_lerp_(own, [state[key].to(self.tensors[key]) for key in averaged], 1 - decay)
        for key in self.tensors.keys() - set(averaged):
            self.tensors[key].copy_(state[key])

    @torch.no_grad()
    def put_into(self, model: nn.Module) -> None:
        """Swap the average into the model, if there is one; ``take_out`` undoes it."""
        if self.tensors:
            state = _tensors(model)
            self._live = {key: value.clone() for key, value in state.items()}
            _copy(self.tensors, state)

    @torch.no_grad()
    def take_out(self, model: nn.Module) -> None:
        """Swap the weights back that ``put_into`` replaced."""
        if self._live:
            _copy(self._live, _tensors(model))
            self._live = {}

    @contextmanager
    def worn_by(self, model: nn.Module) -> Iterator[None]:
        """Swap the average in, as a context manager."""
        self.put_into(model)
        try:
            yield
        finally:
            self.take_out(model)

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and count for a checkpoint."""
        return {"tensors": dict(self.tensors), "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any], model: nn.Module) -> None:
        """Restore what ``state_dict`` returned.

        Raises:
            ValueError: An average of another model.
        """
        own = _tensors(model)
        if own.keys() != state["tensors"].keys():
            raise ValueError("the checkpoint's average is one of another model; start a new run")
        self.tensors = {key: value.clone() for key, value in state["tensors"].items()}
        self.steps = int(state["steps"])


class ScheduleFreeAverage(WeightEMA):
    """The average of the weights that a schedule-free optimiser keeps.

    The optimiser trains weights y and reports their average x. Reading x leaves y as it is to the
    bit, so that validations and checkpoints do not change a training.

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

    def slow_for(self, steps: int) -> str | None:
        """Return None: the average of any number of steps is a good one."""
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
        # The optimiser's own way back would change the last bits.
        _copy(live, state)
        for group in self._optimizer.param_groups:
            group["train_mode"] = True
        return average


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    state = model.state_dict()
    return {key: value for key, value in state.items() if isinstance(value, Tensor)}


def _wide(value: Tensor) -> Tensor:
    small = value.is_floating_point() and value.element_size() < 4
    return value.float() if small else value


def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    for key, value in target.items():
        value.copy_(source[key])


def reported(ema: WeightEMA | None, model: nn.Module) -> AbstractContextManager[Any]:
    """Swap the average in, if evaluation sees it and the model does not have it already."""
    if ema is None or not ema.tensors or not ema.is_reported:
        return nullcontext()
    return ema.worn_by(model)
