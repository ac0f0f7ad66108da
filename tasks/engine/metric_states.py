"""States of metrics beside weights of any precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric


@contextmanager
def kept_states(module: nn.Module) -> Iterator[None]:
    """Keep the types of all metrics' states while a module is converted; devices follow.

    torchmetrics keeps them in ``half`` and ``double``, but Lightning converts by ``to``.
    """
    metrics: list[Any] = [part for part in module.modules() if isinstance(part, Metric)]
    before = [(metric._dtype, metric._defaults, metric.metric_state) for metric in metrics]
    before = [(dtype, dict(defaults), dict(states)) for dtype, defaults, states in before]
    yield
    for metric, (dtype, defaults, states) in zip(metrics, before, strict=True):
        metric._dtype = dtype
        for name, state in states.items():
            setattr(metric, name, _moved(state, metric.device))
            metric._defaults[name] = _moved(defaults[name], metric.device)


def _moved(state: Any, device: Any) -> Any:
    if isinstance(state, Tensor):
        return state.to(device)
    return [part.to(device) for part in state]
