"""Answers of a test: what it finds for each sample, kept as answers.npz in the run folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchmetrics.functional.classification import multiclass_confusion_matrix

from tasks.engine.loops.process_exchange import gather_objects
from tasks.engine.run_folder.atomic_writes import whole_file

FILE = "answers.npz"


@dataclass(frozen=True)
class SampleAnswers:
    """Findings of a test about its samples, in the order of the data.

    Attributes:
        metric: Name of the metric that the values are of, such as "top1".
        ids: File of each sample relative to the data's folder, or another name of it; its index
            where the data have no names (n,).
        arrays: ``value``, float32 (n,), NaN for a sample without a value. A metric that is counted
            over the whole set has ``counts`` as well, parts and wholes of each sample by class
            (n, 2, C): it is the mean over classes of summed parts over summed wholes.
            ``tasks.detection.matches`` has others.
    """

    metric: str
    ids: NDArray[Any]
    arrays: Mapping[str, NDArray[Any]]

    def write(self, folder: Path) -> None:
        """Write answers.npz."""
        with whole_file(folder / FILE) as file:
            arrays: dict[str, Any] = {"metric": self.metric, "ids": self.ids, **self.arrays}
            np.savez_compressed(file, **arrays)


def gather_answers(metric: str, values: Sequence[Tensor], dataset: Any, root: Any) -> SampleAnswers:
    """Return the answers of all processes; each of them has to call it.

    Args:
        metric: See ``SampleAnswers``.
        values: Values (B,) or counts (B, 2, C) of this process's batches; process r of n has the
            samples r, r + n, ...
        dataset: Data of the test.
        root: Folder of the data; None without one.
    """
    ours = torch.cat([value.cpu() for value in values]) if values else torch.empty(0)
    parts = gather_objects(ours.numpy())
    places = np.concatenate(
        [rank + len(parts) * np.arange(len(part)) for rank, part in enumerate(parts)]
    )
    order = places.argsort()
    order = order[places[order] < len(dataset)]  # a sampler of Lightning's repeats samples
    describe = getattr(dataset, "describe", None)
    ids = places[order]
    if describe is not None:
        names = [_inside(describe(index), root) for index in ids.tolist()]
        ids = np.array(names, dtype=str)
    rows = np.concatenate([part for part in parts if len(part)] or parts)[order]
    if rows.ndim == 1:
        return SampleAnswers(metric, ids, {"value": rows})
    value = mean_share(rows).astype(np.float32)
    return SampleAnswers(metric, ids, {"value": value, "counts": rows})


def overlaps(predicted: Tensor, labels: Tensor, classes: int, ignored: int) -> Tensor:
    """Return the places in intersection and union of prediction and label, by class (2, C)."""
    counts = multiclass_confusion_matrix(predicted, labels, classes, ignore_index=ignored)
    hits = counts.diag()
    return torch.stack([hits, counts.sum(0) + counts.sum(1) - hits])


def mean_share(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean over classes of parts over wholes (...), from counts (..., 2, C).

    Classes with a whole of 0 are left out; without any class it is NaN.
    """
    parts, wholes = counts[..., 0, :], counts[..., 1, :]
    has_class = wholes > 0
    shares = np.divide(parts, wholes, out=np.zeros_like(parts), where=has_class).sum(-1)
    classes = has_class.sum(-1)
    return np.divide(shares, classes, out=np.full_like(shares, np.nan), where=classes > 0)


def _inside(name: str, root: Any) -> str:
    """Return a name without the folder of the data, which differs between machines."""
    return name if root is None else name.removeprefix(str(root)).lstrip("/, ")
