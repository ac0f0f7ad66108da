"""What evaluation remembers: matrices over the tokens of windows, computed without autocast."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.amp.autocast_mode import is_autocast_available

from backbones.layers.eval_cache import EvalCache
from backbones.layers.windows import Pattern

MatrixOf = Callable[[Pattern, Pattern], Tensor]


class MatrixCache:
    """The matrices of one map: of full windows, and of up to eight kinds at its edges.

    They are kept apart, so that none pushes out another.
    """

    def __init__(self) -> None:
        self.full, self.edges = EvalCache(), EvalCache()

    def get(
        self,
        sources: Sequence[Tensor],
        matrix: MatrixOf,
        rows: Pattern,
        columns: Pattern,
        u: Tensor,
    ) -> Tensor:
        """What ``exact`` gives, remembered for these weights.

        Args:
            sources: All parameters that the matrix is made of.
            matrix: Makes it.
            rows: Pattern of the windows along H.
            columns: And along W.
            u: What it is multiplied with.
        """
        is_full = rows.tail == rows.size and columns.tail == columns.size
        cache = self.full if is_full else self.edges
        question = (rows, columns, u.dtype)
        return cache.get(sources, question, lambda: exact(matrix, rows, columns, u))


def exact(matrix: MatrixOf, rows: Pattern, columns: Pattern, u: Tensor) -> Tensor:
    """A matrix in the type of u, computed without autocast.

    Squared offsets of 28 tokens do not fit half precision.
    """
    with _no_autocast(u.device.type):
        return matrix(rows, columns).to(u.dtype)


def _no_autocast(device: str) -> contextlib.AbstractContextManager[None]:
    if not is_autocast_available(device):
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)
