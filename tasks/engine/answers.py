"""Answers of a test: one value per sample, kept as answers.npz in the run folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tasks.engine.loops.process_exchange import gather_objects
from tasks.engine.run_folder.atomic_writes import whole_file

FILE = "answers.npz"


@dataclass(frozen=True)
class SampleAnswers:
    """Values of the samples of a test, in the order of the data.

    Attributes:
        metric: Name of the metric that the values are of, such as "top1".
        ids: File of each sample relative to the data's folder, or another name of it; its index
            where the data have no names (n,).
        value: float32 (n,); NaN for a sample without a value.
    """

    metric: str
    ids: NDArray[Any]
    value: NDArray[np.float32]

    def write(self, folder: Path) -> None:
        """Write answers.npz."""
        with whole_file(folder / FILE) as file:
            np.savez_compressed(file, metric=self.metric, ids=self.ids, value=self.value)


def gather_answers(metric: str, values: Sequence[Tensor], dataset: Any, root: Any) -> SampleAnswers:
    """Return the answers of all processes; each of them has to call it.

    Args:
        metric: See ``SampleAnswers``.
        values: Values (B,) of this process's batches; process r of n has the samples r, r + n, ...
        dataset: Data of the test.
        root: Folder of the data; None without one.
    """
    parts = gather_objects(torch.cat([torch.empty(0), *(value.cpu() for value in values)]).numpy())
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
    return SampleAnswers(metric, ids, np.concatenate(parts)[order])


def _inside(name: str, root: Any) -> str:
    """Return a name without the folder of the data, which differs between machines."""
    return name if root is None else name.removeprefix(str(root)).lstrip("/, ")
