"""Metrics of weights and averaged weights in one pass over the data."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class SecondMetrics:
    """A second set of a task's metrics, swapped in while the average is evaluated.

    Args:
        task: Task with freshly reset metrics.
        stores: Names of its attributes that contain metrics.
    """

    def __init__(self, task: Any, stores: Sequence[str]) -> None:
        self._copies = {name: copy.deepcopy(getattr(task, name)) for name in stores}

    @contextmanager
    def swap_in(self, task: Any) -> Iterator[None]:
        """Swap the copies into the task, as a context manager."""
        metrics = {name: getattr(task, name) for name in self._copies}
        self._set(task, self._copies)
        try:
            yield
        finally:
            self._set(task, metrics)

    @staticmethod
    def _set(task: Any, stores: dict[str, Any]) -> None:
        for name, store in stores.items():
            setattr(task, name, store)


def log_better(task: Any, second: SecondMetrics) -> None:
    """Log the better figures of weights and average, and the monitored metric of both."""
    figures, name = task._figures(), task.family.monitor
    with second.swap_in(task):
        ema_figures = task._figures()
    task.ema.is_reported = bool(task.family.is_better(ema_figures[name], figures[name]))
    task._log_figures("val", ema_figures if task.ema.is_reported else figures)
    task.log(f"{task.monitor}_weights", figures[name])
    task.log(f"{task.monitor}_ema", ema_figures[name])
