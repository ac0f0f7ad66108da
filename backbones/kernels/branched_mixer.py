"""W2 gelu(BN(DW(BN(concat_i Arb_i(W1 x + b1))))) + b2 in one operator: IFFN, Eq. 5.

``csrc/branched.cpp`` takes a few hundred tokens through all steps while they are in the cache,
where no norm asks for the whole batch. The backward pass keeps x, the narrow layer z and the
convolution's output u, and computes activations and norms again: fewer numbers than an FFN keeps.

Axes: B images, H W map, C channels, w channels of z, h = N w hidden channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from backbones.kernels.autocast import for_products

NAME = "mixerlab::branched_mixer"
STATISTICS = 5  # rows; the last four are mean and variance of the first norm, then of the second
PER_CHANNEL = 18  # rows of gradients, in the order of ``_backward``


def branched_mixer(
    tokens: Tensor,
    size: tuple[int, int],
    first: tuple[Tensor, Tensor],
    coefficients: Sequence[Tensor],
    norms: Sequence[Tensor],
    running: Sequence[Tensor],
    eps: tuple[float, float],
    training: bool,
    depthwise: tuple[Tensor, Tensor],
    last: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """A map (B, H W, C) -> the same, and the statistics of the batch, (4, h).

    Args:
        tokens: (B, H W, C).
        size: (H, W).
        first: W1 (w, C) and b1 (w,).
        coefficients: alpha, beta, gamma, theta of one branch after the other, each (w,).
        norms: Weight and bias of both norms, each (h,).
        running: Running mean and variance of both norms, each (h,).
        eps: Of both norms.
        training: Whether the norms take the batch's statistics, mean and biased variance of either
            norm; otherwise what is returned of them means nothing.
        depthwise: Kernel (h, 1, 3, 3) and bias (h,).
        last: W2 (C, h) and b2 (C,).
    """
    tensors = (tokens, *first, *coefficients, *norms, *depthwise, *last)
    keep = training or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
    if torch.is_autocast_enabled(tokens.device.type):
        tokens, *products = for_products(tokens, *first, *last)
        first, last = (products[0], products[1]), (products[2], products[3])
    y, _, _, statistics = torch.ops.mixerlab.branched_mixer(
        tokens.contiguous(), *size, *first, coefficients, norms, running, *eps, training,
        *depthwise, *last, keep,
    )  # fmt: skip
    return y, statistics[1:]


def register() -> None:
    """Tell torch what the operator is on "meta" and in a count; see csrc for its gradients."""
    torch.library.register_fake(NAME, _fake)
    torch.library.register_fake(f"{NAME}_backward", _fake_backward)
    register_flop_formula(torch.ops.mixerlab.branched_mixer)(_flops)


def _fake(
    tokens: Tensor, height: int, width: int, w1: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    w2, keep = rest[9], rest[11]
    batch, count = tokens.shape[:2]
    kept = batch if keep else 0
    return (
        tokens.new_empty(batch, count, w2.shape[0]),
        tokens.new_empty(kept, count, w1.shape[0]),
        tokens.new_empty(kept, count, w2.shape[1]),
        rest[3][0].new_empty(STATISTICS, w2.shape[1]),
    )


def _fake_backward(
    grad: Tensor,
    z: Tensor,
    u: Tensor,
    statistics: Tensor,
    tokens: Tensor,
    height: int,
    width: int,
    w1: Tensor,
    b1: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    w2 = rest[-1]
    return (
        torch.empty_like(tokens),
        torch.empty_like(w1),
        torch.empty_like(b1),
        rest[1][0].new_empty(PER_CHANNEL, w2.shape[1]),
        torch.empty_like(w2),
    )


def _flops(tokens_shape: Any, height: int, width: int, w1_shape: Any, *rest: Any, **_: Any) -> int:
    """Two per multiply-add, as torch counts the same operations one by one."""
    batch, count, _dim = tokens_shape
    out_dim, hidden = rest[9]
    pointwise = w1_shape[0] * w1_shape[1] + hidden * out_dim
    return int(2 * batch * count * (pointwise + hidden * 9))
