"""Weighted vote of the nearest training images.

Source: Caron et al., "Emerging Properties in Self-Supervised Vision Transformers" (DINO), ICCV
2021, App. F.1 and the authors' eval_knn.py: cosine similarity s, votes exp(s / 0.07) of the 10, 20,
100 and 200 nearest; the paper reports 20.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from backbones.layers.bounds import check_positive, check_range
from heads.frozen.features import Features, Solution, SolveOptions, accuracy

REPORTED = 20
CHUNK = 1024  # images per similarity matrix with all training images


@dataclass(frozen=True)
class Neighbours:
    """Vote of the nearest neighbours, for several numbers of them; deterministic.

    Attributes:
        neighbours: Numbers of voting images.
        temperature: Divisor of the similarities.
    """

    neighbours: Sequence[int] = (10, 20, 100, 200)
    temperature: float = 0.07

    def __post_init__(self) -> None:
        check_range("head.knn.neighbours", min(self.neighbours, default=0), 1)
        check_positive("head.knn.temperature", self.temperature)

    def solve(self, train: Features, test: Features, classes: int, draw: SolveOptions) -> Solution:
        """Vote; see ``Method``.

        Raises:
            ValueError: There are more neighbours than training images.
        """
        counts = sorted(set(self.neighbours))
        if counts[-1] > len(train):
            raise ValueError(
                f"head.knn.neighbours={counts} exceeds the {len(train)} training "
                "images; pass fewer, such as head.knn.neighbours=[10,20]"
            )
        device = draw.device
        bank, labels = F.normalize(train.values.to(device)), train.labels.to(device)
        votes: dict[int, list[Tensor]] = {count: [] for count in counts}
        for queries in test.values.split(CHUNK):
            sims, rows = nearest(queries.to(device), bank, counts[-1])
            for count, parts in votes.items():
                near = labels[rows[:, :count]]
                parts.append(vote(sims[:, :count], near, classes, self.temperature))
        metrics = {
            f"top1_knn{count}": accuracy(torch.cat(parts), test.labels.to(device))
            for count, parts in votes.items()
        }
        headline_count = REPORTED if REPORTED in counts else counts[0]

        def classify(features: Tensor) -> Tensor:
            sims, rows = nearest(features.to(device).float(), bank, headline_count)
            scores = vote(sims, labels[rows], classes, self.temperature)
            return (scores / scores.sum(1, keepdim=True)).log()

        return Solution(metrics, classify, {"top1": f"top1_knn{headline_count}"})


def nearest(queries: Tensor, bank: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return similarities and rows (B, count) of the most similar in a bank (N, D), best first.

    Args:
        queries: (B, D).
        bank: Features of unit length.
        count: Number of neighbours.
    """
    best = (F.normalize(queries) @ bank.T).topk(count, sorted=True)
    return best.values, best.indices


def vote(similarities: Tensor, labels: Tensor, classes: int, temperature: float) -> Tensor:
    """Return exp(similarity / temperature) summed per class: (B, k), (B, k) -> (B, K)."""
    votes = similarities.new_zeros(len(similarities), classes)
    return votes.scatter_add_(1, labels, (similarities / temperature).exp())
