"""Sums over keys in the order that is linear in the number of tokens.

Source: Katharopoulos et al., "Transformers are RNNs", ICML 2020, https://arxiv.org/abs/2006.16236,
Eq. 5 and 6.

Axes: N queries, M keys, d channels of both, e channels of values.
"""

from __future__ import annotations

from torch import Tensor

EPS = 1e-6


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    weighing: tuple[Tensor, Tensor] | None = None,
    eps: float = EPS,
) -> Tensor:
    """Return q (sum_m k_m v_m / M) / (q_w mean k_w + eps): (..., N, e).

    Args:
        queries: (..., N, d), positive features.
        keys: (..., M, d).
        values: (..., M, e).
        weighing: Queries and keys of the divisor, such as those before a rotation; the same by
            default.
        eps: Added to the divisor.
    """
    weighing_q, weighing_k = weighing or (queries, keys)
    divisor = weighing_q @ weighing_k.mean(dim=-2, keepdim=True).mT + eps
    # Scaled before the product: sums over a large map do not fit into half precision.
    share = keys.shape[-2] ** -0.5
    return queries @ ((keys * share).mT @ (values * share)) / divisor
