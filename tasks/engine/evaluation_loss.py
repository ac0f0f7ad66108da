"""Validation loss of predictions, as a sum and a count.

It is the plain cross entropy, without smoothing, class weights and auxiliary heads, so that runs
with different training losses compare. It is deterministic.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Summed = tuple[Tensor, Tensor]


def class_loss(logits: Tensor, labels: Tensor) -> Summed:
    """Return the cross entropy of the labelled images, and their number.

    Args:
        logits: (B, K).
        labels: (B,), negative where unknown.
    """
    known = labels >= 0
    loss = F.cross_entropy(logits[known].float(), labels[known], reduction="sum")
    return loss, known.sum()


def pixel_loss(samples: Iterable[Any], ignored: int) -> Summed:
    """Return the cross entropy of the labelled pixels, and their number.

    Args:
        samples: MMSegmentation's, with ``seg_logits`` (K, H, W) and ``gt_sem_seg`` (1, H, W).
        ignored: Label of the pixels to skip.
    """
    losses, counts = [], []
    for sample in samples:
        logits = sample.seg_logits.data.float()
        labels = sample.gt_sem_seg.data.to(logits.device).long()
        losses.append(F.cross_entropy(logits[None], labels, ignore_index=ignored, reduction="sum"))
        counts.append((labels != ignored).sum())
    return torch.stack(losses).sum(), torch.stack(counts).sum()
