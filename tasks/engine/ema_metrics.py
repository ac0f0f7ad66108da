"""Metrics of a second set of predictions, beside a task's own, in one pass over the data."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class SecondJudgement:
    """Copies of what a task keeps its metrics in, which take their place for a while.

    Args:
        task: A task that has taken in nothing yet.
        stores: Names of its attributes that hold metrics.
    """

    def __init__(self, task: Any, stores: Sequence[str]) -> None:
        self._kept = {name: copy.deepcopy(getattr(task, name)) for name in stores}

    @contextmanager
    def taken_in(self, task: Any) -> Iterator[None]:
        """Let the task take predictions into the copies, and compute its figures from them."""
        own = {name: getattr(task, name) for name in self._kept}
        self._put(task, self._kept)
        try:
            yield
        finally:
            self._put(task, own)

    @staticmethod
    def _put(task: Any, stores: dict[str, Any]) -> None:
        for name, store in stores.items():
            setattr(task, name, store)


def log_better(task: Any, beside: SecondJudgement) -> None:
    """Log the figures of the weights or of their average, whichever are better, and both."""
    own, name = task._figures(), task.family.monitor
    with beside.taken_in(task):
        other = task._figures()
    task.ema.is_reported = bool(task.family.is_better(other[name], own[name]))
    task._log_figures("val", other if task.ema.is_reported else own)
    task.log(f"{task.monitor}_weights", own[name])
    task.log(f"{task.monitor}_ema", other[name])
