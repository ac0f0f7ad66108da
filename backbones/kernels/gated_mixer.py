"""W3 (silu(DW_a(W_a x + b_a)) * DW_b(W_b x + b_b)) + b3 in one operator: AFBO, Eq. 4.

``csrc/gated.cpp`` takes a few hundred tokens through all steps while they are in the cache. The
backward pass keeps x and what is mapped, and computes convolutions, gate and product again: it
needs as much memory as an FFN, where torch's operations keep four more maps.

Axes: B images, P prefix tokens, H W map, C channels, h hidden channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from backbones.kernels.autocast import for_products

NAME = "mixerlab::gated_mixer"


def gated_mixer(
    tokens: Tensor,
    prefix: int,
    size: tuple[int, int],
    weights: Sequence[Tensor],
    blocks: Sequence[int],
    before: tuple[Tensor | None, Tensor | None],
    kernels: tuple[Tensor, Tensor],
    own: tuple[Tensor | None, Tensor | None],
    proj: Tensor,
    proj_bias: Tensor | None,
) -> Tensor:
    """Prefix tokens, which skip the convolutions, and a map: (B, P + H W, C) -> the same.

    Args:
        tokens: (B, P + H W, C).
        prefix: P.
        size: (H, W).
        weights: Of both mappings, each (rows, columns).
        blocks: By pairs, first those of a: the number of a weight, and the first column of x that
            it reads; one that reaches beyond the last column goes on with the first. Their rows are
            the 2 h channels in order.
        before: b_a and b_b, (h,).
        kernels: (h, 1, 3, 3), of DW_a and DW_b.
        own: Biases of DW_a and DW_b, (h,).
        proj: W3, (C, h).
        proj_bias: b3, (C,).
    """
    tensors = (tokens, *weights, *before, *kernels, *own, proj, proj_bias)
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if torch.is_autocast_enabled(tokens.device.type):
        tokens, proj, *weights = for_products(tokens, proj, *weights)
        proj_bias = None if proj_bias is None else proj_bias.to(proj.dtype)
    y, _ = torch.ops.mixerlab.gated_mixer(
        tokens.contiguous(), prefix, *size, weights, blocks, *before, *kernels, *own, proj,
        proj_bias, keep,
    )  # fmt: skip
    result: Tensor = y
    return result


def register() -> None:
    """Tell torch what the operator is on "meta" and in a count; see csrc for its gradients."""
    torch.library.register_fake(NAME, _fake)
    torch.library.register_fake(f"{NAME}_backward", _fake_backward)
    register_flop_formula(torch.ops.mixerlab.gated_mixer)(_flops)


def _fake(
    tokens: Tensor, prefix: int, height: int, width: int, weights: Sequence[Tensor], *rest: Any
) -> tuple[Tensor, Tensor]:
    proj, keep = rest[7], rest[9]
    batch, count = tokens.shape[:2]
    kept = tokens.new_empty(batch if keep else 0, count, 2 * proj.shape[1])
    return tokens.new_empty(batch, count, proj.shape[0]), kept


def _fake_backward(
    grad: Tensor,
    kept: Tensor,
    tokens: Tensor,
    prefix: int,
    height: int,
    width: int,
    weights: Sequence[Tensor],
    *rest: Any,
) -> tuple[Tensor, list[Tensor], Tensor, Tensor, Tensor, Tensor]:
    kernel, proj = rest[3], rest[-1]
    hidden = proj.shape[1]
    return (
        torch.empty_like(tokens),
        [torch.empty_like(weight) for weight in weights],
        kernel.new_empty(2, hidden),
        kernel.new_empty(2, 9, hidden),
        kernel.new_empty(2, hidden),
        torch.empty_like(proj),
    )


def _flops(
    tokens_shape: Any,
    prefix: int,
    height: int,
    width: int,
    weights_shapes: Any,
    blocks: Sequence[int],
    *rest: Any,
    **_: Any,
) -> int:
    """Two per multiply-add, as torch counts the same operations one by one."""
    batch, count, _dim = tokens_shape
    out_dim, hidden = rest[6]
    mapped = sum(weights_shapes[index][0] * weights_shapes[index][1] for index in blocks[::2])
    pointwise = batch * count * (mapped + hidden * out_dim)
    return int(2 * (pointwise + batch * height * width * hidden * 18))
