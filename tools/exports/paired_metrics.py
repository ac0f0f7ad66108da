"""A metric of two networks on the same samples, with the interval of its difference."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats
from torch import Tensor, nn
from torchmetrics import Metric

GROUPS = 25  # of samples
LEVEL = 0.05


@dataclass(frozen=True)
class Difference:
    """A metric before and after a change.

    Attributes:
        before: Of the first network.
        after: Of the second one.
        low: Lower end of the 95 % interval of ``after - before``; NaN with fewer than two groups.
        high: Its upper end.
    """

    before: float
    after: float
    low: float
    high: float


class PairedMetric:
    """The monitored metric of a task by two lists of predictions for the same samples.

    Samples are divided into groups, and the metric is computed without each of them: the grouped
    jackknife, which serves means, ratios and average precision alike. Samples stay paired.

    Source: Busing, Meijer and van der Leeden, Statistics and Computing 9 (1999), Eq. 4 to 6, for
    groups of different sizes; Student's t has the degrees of freedom of the groups.

    Args:
        task: Its metrics are used.
        samples: Number of samples that will come.
    """

    def __init__(self, task: Any, samples: int) -> None:
        self.task, self.samples, self.seen = task, samples, 0
        self.names: tuple[str, ...] = task.metric_stores
        count = min(GROUPS, samples)
        self.sizes = [0] * count
        self.stores = [[self._blank() for _ in range(count)] for _ in range(2)]

    def _blank(self) -> dict[str, Any]:
        """Return metrics without samples; what they are told of the data is shared."""
        self._swap(
            {
                name: copy.deepcopy(store) if isinstance(store, nn.Module) else copy.copy(store)
                for name in self.names
                for store in (getattr(self.task, name),)
            }
        )
        self.task.reset_metrics()
        return {name: getattr(self.task, name) for name in self.names}

    def _swap(self, stores: dict[str, Any]) -> None:
        for name, store in stores.items():
            setattr(self.task, name, store)

    def update(self, batch: Any, first: Any, second: Any, count: int) -> None:
        """Add the predictions of both for a batch of ``count`` samples, all of one group."""
        group = self.seen * len(self.sizes) // self.samples
        for stores, predictions in zip(self.stores, (first, second), strict=True):
            self._swap(stores[group])
            self.task.update_metrics(batch, predictions)
        self.seen += count
        self.sizes[group] += count

    def compute(self) -> Difference:
        """Return the metric of both and the interval of the difference."""
        used = [group for group, size in enumerate(self.sizes) if size]
        before, after = (self._value(stores, used) for stores in self.stores)
        if len(used) < 2:
            return Difference(before, after, math.nan, math.nan)
        without = [
            self._value(self.stores[1], rest) - self._value(self.stores[0], rest)
            for rest in ([group for group in used if group != omitted] for omitted in used)
        ]
        shares = self.seen / np.array([self.sizes[group] for group in used])
        change, parts = after - before, np.array(without)
        estimate = (change - parts + parts / shares).sum()
        pseudo = shares * change - (shares - 1) * parts
        error = math.sqrt(np.mean((pseudo - estimate) ** 2 / (shares - 1)))
        width = float(stats.t.isf(LEVEL / 2, len(used) - 1)) * error
        return Difference(before, after, change - width, change + width)

    def _value(self, stores: Sequence[dict[str, Any]], groups: Sequence[int]) -> float:
        """Return the monitored metric of some groups."""
        self._swap({n: joined([stores[group][n] for group in groups]) for n in self.names})
        return float(self.task.compute_metrics()[self.task.family.monitor])


def joined(stores: Sequence[Any]) -> Any:
    """Return the metrics of all samples from those of parts of them."""
    if not isinstance(stores[0], nn.Module):
        total = copy.copy(stores[0])
        total.reset()
        for store in stores:
            total.merge(store)
        return total
    total = copy.deepcopy(stores[0])
    rows = zip(*(store.modules() for store in stores), strict=True)
    for metric, row in zip(total.modules(), rows, strict=True):
        if isinstance(metric, Metric):
            metric._computed = None
            for name in metric.metric_state:
                setattr(metric, name, _sum([getattr(part, name) for part in row]))
    return total


def _sum(states: Sequence[Any]) -> Any:
    """Return the sum of tensors, or all parts of lists."""
    if isinstance(states[0], Tensor):
        return sum(states[1:], states[0].clone())
    return [part for state in states for part in state]
