"""Figures of a segmentation from its points per class, of one set or of several folds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Literal

Absent = Literal["skip", "zero"]
Counts = Mapping[str, Sequence[float]]  # of classes: "intersection", "union" and "target"


def scores(counts: Counts, absent: Absent) -> dict[str, float]:
    """Return mIoU, mAcc and allAcc in percent.

    Args:
        counts: Points of each class that are predicted right, that are labelled or predicted, and
            that are labelled.
        absent: A class without points in a denominator is left out of that mean ("skip"), or
            counts as 0 ("zero"), as in Pointcept.
    """
    hits = counts["intersection"]

    def mean(wholes: Sequence[float]) -> float:
        shares = [part / total for part, total in zip(hits, wholes, strict=True) if total]
        if absent == "zero":
            shares += [0.0] * (len(wholes) - len(shares))
        return 100 * fmean(shares or [float("nan")])

    labelled = sum(counts["target"])
    return {
        "mIoU": mean(counts["union"]),
        "mAcc": mean(counts["target"]),
        "allAcc": 100 * sum(hits) / labelled if labelled else float("nan"),
    }


def pooled(folds: Sequence[Sequence[Counts]]) -> dict[str, float]:
    """Return the figures of folds whose counts are summed, as by Pointcept's six-fold script.

    Args:
        folds: Counts of the runs of each fold; a fold counts by their mean.
    """
    total = {
        name: [
            sum(values)
            for values in zip(*(_mean_counts(runs, name) for runs in folds), strict=True)
        ]
        for name in ("intersection", "union", "target")
    }
    return scores(total, "zero")


def _mean_counts(runs: Sequence[Counts], name: str) -> list[float]:
    return [fmean(values) for values in zip(*(counts[name] for counts in runs), strict=True)]
