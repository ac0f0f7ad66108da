"""Metrics of runs on test samples that are drawn again, from the answers in their run folders."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.comparison.journal import Run

ANSWERS = "answers.npz"  # in a run folder: ids (N,) and what the test found for each of them
CLOSE = 1e-3  # of a metric and what its answers give
MOST = 2_000_000  # numbers of a table of draws at a time
RECALLS = np.linspace(0, 1, 101)  # at which COCO takes the precision
Floats = NDArray[np.float64]


class Answers(ABC):
    """Answers of runs on the same test samples.

    Attributes:
        draws: Number of times to draw the samples.
    """

    draws = 2_000

    @abstractmethod
    def moves(self, generator: np.random.Generator) -> Floats:
        """Draw the samples again, and return how far the mean metric of the runs moves (draws,).

        It is NaN where the drawn samples lack the metric.

        Args:
            generator: Draws the samples, which are the same for all runs.
        """


class Means(Answers):
    """Metrics that are the mean of a value per sample.

    Args:
        rows: Values of each run's samples (N,).
        scale: Units of the metric per unit of the values.
    """

    def __init__(self, rows: Sequence[Floats], scale: float = 1.0) -> None:
        self.table, self.scale = np.stack([np.asarray(row, float) for row in rows]), scale

    def moves(self, generator: np.random.Generator) -> Floats:
        """Draw samples of equal answers together: right and wrong ones are few values."""
        means = self.table.mean(0)
        values, counts = np.unique(means - means.mean(), return_counts=True)
        parts = []
        for part in np.array_split(range(self.draws), -(-self.draws * len(counts) // MOST)):
            weights = generator.multinomial(len(means), counts / len(means), len(part))
            parts.append(self.scale * (weights @ values) / len(means))
        return np.concatenate(parts)


class SetAnswers(Answers):
    """Metrics of the whole set.

    Args:
        samples: Number of samples.
        runs: Number of runs.
        scale: Units of the metric per unit of ``measure``.
    """

    draws = 500

    def __init__(self, samples: int, runs: int, scale: float = 1.0) -> None:
        self.samples, self.runs, self.scale = samples, runs, scale

    @abstractmethod
    def measure(self, run: int, weights: Floats) -> Floats:
        """Return the metric of a run (draws,), of samples that occur so often (draws, N)."""

    def moves(self, generator: np.random.Generator) -> Floats:
        """Draw the samples and measure the runs again."""
        shares = np.full(self.samples, 1 / self.samples)
        weights = generator.multinomial(self.samples, shares, self.draws).astype(float)
        weights = np.concatenate([np.ones((1, self.samples)), weights])
        metrics = np.stack([self.measure(run, weights) for run in range(self.runs)], 1)
        return self.scale * (metrics[1:] - metrics[0]).mean(1)


class Shares(SetAnswers):
    """Means over classes of summed parts over summed wholes, as mIoU.

    Args:
        counts: Of each run, parts and wholes by sample and class (N, 2, C).
        scale: See ``SetAnswers``.
    """

    def __init__(self, counts: Sequence[Floats], scale: float = 1.0) -> None:
        super().__init__(len(counts[0]), len(counts), scale)
        self.counts = counts

    def measure(self, run: int, weights: Floats) -> Floats:
        """Return the mean over the classes that occur or are predicted."""
        parts, wholes = (weights @ self.counts[run][:, place] for place in (0, 1))
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.nanmean(parts / wholes, 1)


class Precisions(SetAnswers):
    """COCO's average precision of boxes.

    Args:
        matches: Of each run, the arrays of ``tasks.detection.matches.box_matches``.
        scale: See ``SetAnswers``.
    """

    def __init__(self, matches: Sequence[dict[str, NDArray[Any]]], scale: float = 1.0) -> None:
        super().__init__(len(matches[0]["objects"]), len(matches), scale)
        self.matches = matches

    def measure(self, run: int, weights: Floats) -> Floats:
        """Return the mean over classes with objects, and over thresholds of IoU."""
        matches = self.matches[run]
        total, classes = np.zeros(len(weights)), np.zeros(len(weights))
        for category in range(matches["objects"].shape[1]):
            places = np.flatnonzero(matches["category"] == category)
            places = places[np.argsort(-matches["score"][places], kind="stable")]
            match, image = matches["match"][places], matches["image"][places]
            for draw, row in enumerate(weights):
                objects = row @ matches["objects"][:, category]
                if objects:
                    classes[draw] += 1
                    total[draw] += average_precision(match, row[image], objects)
        with np.errstate(invalid="ignore"):
            return total / classes


def average_precision(match: NDArray[np.int8], weights: Floats, objects: float) -> float:
    """Return COCO's average precision of a class, mean over thresholds of IoU.

    Args:
        match: 1 for right, 0 for wrong, -1 for uncounted detections (D, T), the surest first.
        weights: How often each of them occurs (D,).
        objects: Number of objects that count.
    """
    right = np.cumsum(weights[:, None] * (match == 1), 0)
    wrong = np.cumsum(weights[:, None] * (match == 0), 0)
    precision = right / np.maximum(right + wrong, np.finfo(float).tiny)
    precision = np.maximum.accumulate(precision[::-1])[::-1]
    recall = right / objects
    sums = 0.0
    for threshold in range(match.shape[1]):
        places = np.searchsorted(recall[:, threshold], RECALLS)
        sums += precision[places[places < len(precision)], threshold].sum()
    return sums / (len(RECALLS) * match.shape[1])


def read_answers(runs: Sequence[Run], metric: str) -> Answers | None:
    """Return the answers of runs; None unless all have them, of the same samples and this metric.

    Samples without a value in some run are left out.
    """
    files: list[dict[str, NDArray[Any]]] = []
    for run in runs:
        path = Path(run.folder) / ANSWERS
        if not path.is_file():
            return None
        with np.load(path, allow_pickle=False) as content:
            if str(content.get("metric", metric)) != metric:
                return None
            files.append(dict(content))
    if not files or not all(np.array_equal(files[0]["ids"], file["ids"]) for file in files):
        return None
    values = [run.value for run in runs]
    if "match" in files[0]:
        return _scaled(Precisions(files), values)
    if "counts" in files[0]:
        return _scaled(Shares([file["counts"] for file in files]), values)
    table = np.stack([np.asarray(file["value"], float) for file in files])
    table = table[:, np.isfinite(table).all(0)]
    for scale in (1.0, 100.0):
        if table.size and _is_close(scale * table.mean(1), values):
            return Means(list(table), scale)
    return None


def _scaled(answers: SetAnswers, values: Sequence[float]) -> SetAnswers | None:
    """Return answers in the unit of the runs' metric; None if they give another value."""
    every = np.ones((1, answers.samples))
    measures = np.array([answers.measure(run, every)[0] for run in range(answers.runs)])
    for scale in (1.0, 100.0):
        if _is_close(scale * measures, values):
            answers.scale = scale
            return answers
    return None


def _is_close(measures: Floats, values: Sequence[float]) -> bool:
    return np.allclose(measures, values, rtol=CLOSE, atol=CLOSE)
