"""The loss of predictions that a validation makes anyway, as a sum and a count of what it is over.

It is the plain cross entropy, without smoothing, class weights and auxiliary heads, so that runs
which train with different ones compare. Nothing here draws random numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Summed = tuple[Tensor, Tensor]


def of_classes(logits: Tensor, labels: Tensor) -> Summed:
    """Over images with a label: logits (B, K), labels (B,), negative where unknown."""
    known = labels >= 0
    loss = F.cross_entropy(logits[known].float(), labels[known], reduction="sum")
    return loss, known.sum()


def of_segments(samples: Iterable[Any], ignored: int) -> Summed:
    """Over the pixels that count, at the size of the annotations.

    Args:
        samples: MMSegmentation's, with ``seg_logits`` (K, H, W) and ``gt_sem_seg`` (1, H, W).
        ignored: Label of the pixels that do not count.
    """
    losses, counts = [], []
    for sample in samples:
        logits = sample.seg_logits.data.float()
        labels = sample.gt_sem_seg.data.to(logits.device).long()
        losses.append(F.cross_entropy(logits[None], labels, ignore_index=ignored, reduction="sum"))
        counts.append((labels != ignored).sum())
    return torch.stack(losses).sum(), torch.stack(counts).sum()
