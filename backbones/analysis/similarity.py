"""Similarity of layers and tokens, and the effective rank of features.

Source: Kornblith et al., "Similarity of Neural Network Representations Revisited", ICML 2019,
https://arxiv.org/abs/1905.00414, Eq. 3 to 5 (linear CKA); Roy and Vetterli, "The effective rank",
EUSIPCO 2007, Def. 1; token similarity as in Gong et al., "Vision Transformers with Patch
Diversification", 2021, https://arxiv.org/abs/2104.12753, Eq. 4 (of distinct tokens, with signs).

Axes: n examples, p features, B images, C channels, (h, w) map, N = h w tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def centred_gram(features: Tensor) -> Tensor:
    """Return H X X^T H with H = I - 1/n for examples in rows: (n, ...) -> (n, n), in float64."""
    rows = features.detach().flatten(1).double()
    rows = rows - rows.mean(0)
    return rows @ rows.T


def alignment(first: Tensor, second: Tensor) -> float:
    """Return the linear CKA of centred Gram matrices, HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L)).

    It is NaN if one of them is zero.
    """
    scale = (first.square().sum() * second.square().sum()).sqrt()
    return float((first * second).sum() / scale)


def alignments(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> Tensor:
    """Return the CKA of every layer of one network with every layer of another.

    Args:
        first: Centred Gram matrices (n, n) by layer.
        second: The other network's, of the same examples in the same order.

    Returns:
        (layers, layers).

    Raises:
        ValueError: Numbers of examples differ, or are below 3, where all layers are equal.
    """
    sizes = {len(gram) for gram in (*first.values(), *second.values())}
    if len(sizes) != 1 or min(sizes) < 3:
        raise ValueError(f"layers are compared on the same images, at least 3; got {sorted(sizes)}")
    rows = [[alignment(a, b) for b in second.values()] for a in first.values()]
    return torch.tensor(rows, dtype=torch.float64)


def token_similarity(maps: Tensor) -> Tensor:
    """Return the mean cosine of the angles between different tokens: (B, C, h, w) -> (B,).

    It is 1 if all tokens are parallel, as in an oversmoothed network, and NaN for a single token.
    """
    tokens = maps.detach().double().flatten(2)
    units = tokens / tokens.norm(dim=1, keepdim=True).clamp(min=1e-12)
    count = units.shape[2]
    # The sum over all pairs is the square of the sum of units, less the pairs of equal tokens.
    total = units.sum(2).square().sum(1) - units.square().sum((1, 2))
    return total / (count * (count - 1)) if count > 1 else total * torch.nan


def effective_rank(maps: Tensor) -> Tensor:
    """Return exp of the entropy of the tokens' normalised singular values: (B, C, h, w) -> (B,).

    It is from 1 to min(N, C). Tokens are not centred, as in the definition.
    """
    values = torch.linalg.svdvals(maps.detach().double().flatten(2))
    shares = values / values.sum(1, keepdim=True).clamp(min=1e-300)
    return torch.exp(-torch.special.xlogy(shares, shares).sum(1))
