"""Inputs to time networks for texts on, which random numbers cannot stand for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def first_words(batch: int, shape: Sequence[int]) -> Tensor:
    """Return texts of the first word, whose embedding takes as long as any other: (B, L)."""
    return torch.zeros(batch, *shape)
