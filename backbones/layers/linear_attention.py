"""Sums over keys in the order that is linear in the number of tokens.

Source: Katharopoulos et al., "Transformers are RNNs", ICML 2020, https://arxiv.org/abs/2006.16236,
Eq. 5 and 6.

Axes: N queries, M keys, d channels of both, e channels of values.
"""

from __future__ import annotations

import torch
from torch import Tensor

EPS = 1e-6


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    weighing: tuple[Tensor, Tensor] | None = None,
    eps: float = EPS,
) -> Tensor:
    """Return q (sum_m k_m v_m / M) / (q_w mean k_w + eps): (..., N, e) in the values' type.

    Args:
        queries: (..., N, d), positive features.
        keys: (..., M, d).
        values: (..., M, e).
        weighing: Queries and keys of the divisor, such as those before a rotation; the same by
            default.
        eps: Added to the divisor.
    """
    sums = sum_products(keys, values)
    if weighing is None:
        return divide(queries @ torch.cat([sums, mean_keys(keys)], dim=-1), 1, eps)
    divisor = weighing[0] @ mean_keys(weighing[1]) + eps
    return queries @ sums / divisor


def sum_products(keys: Tensor, values: Tensor) -> Tensor:
    """Return sum_m k_m v_m / M: (..., M, d) and (..., M, e) -> (..., d, e)."""
    # Scaled before the product: sums over a large map do not fit into half precision.
    share = keys.shape[-2] ** -0.5
    return (keys * share).mT @ (values * share)


def mean_keys(keys: Tensor) -> Tensor:
    """Return mean_m k_m, added in float32 at least: (..., M, d) -> (..., d, 1)."""
    precise = torch.promote_types(keys.dtype, torch.float32)
    return keys.mean(dim=-2, keepdim=True, dtype=precise).to(keys.dtype).mT


def divide(reads: Tensor, divisors: int, eps: float) -> Tensor:
    """Divide equal parts of the channels by the last channels, in float32 at least.

    Args:
        reads: (..., e + n).
        divisors: n.
        eps: Added to the divisors.

    Returns:
        (..., e) in the same type.
    """
    precise = torch.promote_types(reads.dtype, torch.float32)
    width = reads.shape[-1] - divisors
    tops, bottoms = reads.to(precise).split((width, divisors), dim=-1)
    parts = tops.unflatten(-1, (divisors, -1)) / (bottoms.unsqueeze(-1) + eps)
    return parts.flatten(-2).to(reads.dtype)
