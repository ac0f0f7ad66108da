"""A sum over many functions of a map, some at a time: no tensor holds all of their values."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from backbones.layers.eager import in_graph, is_transformed

CHUNK_ELEMENTS = 2**20  # of the tensor (tokens, functions, C) that is never formed as a whole
# A recorded graph serves any number of tokens: its chunks are those of a map of 8 x 8.
GRAPH_TOKENS = 64


def chunked_sum(
    summed: Callable[..., Tensor], x: Tensor, coefficients: Sequence[Tensor], total: Tensor
) -> Tensor:
    """``total`` plus the sum over all functions; with autograd a chunk is computed again backward.

    ``torch.func`` does not know such chunks; its derivatives keep the values of all.

    Args:
        summed: From x and the coefficients (j, ...) of j functions to their sum (..., C).
        x: (..., C).
        coefficients: Each (h, ...), of all h functions.
        total: (..., C), what the sum begins with.
    """
    elements = GRAPH_TOKENS * x.shape[-1] if in_graph() else x.numel()
    step = max(1, CHUNK_ELEMENTS // max(1, elements))
    for chunk in zip(*(c.split(step) for c in coefficients), strict=True):
        if torch.is_grad_enabled() and not is_transformed():
            part = checkpoint(summed, x, *chunk, use_reentrant=False, preserve_rng_state=False)
        else:
            part = summed(x, *chunk)
        total = total + part
    return total
