"""SiLU(x W_G) * LN(SiLU(W_s p W_c) * V) in one operator: SBM, Eq. 2, without a gradient.

``csrc/star.cpp`` takes an image through all steps while it is in the cache: on a map of 14 x 14
tokens torch's operations take as long to begin as to compute.

Axes: B images, H W map, n = H W tokens, C channels, m latent tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

NAME = "mixerlab::star_mixer"


def star_mixer(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    kernel: Tensor,
    own: Tensor,
    factors: tuple[Tensor, Tensor],
    eps: float,
) -> Tensor:
    """A map (B, H, W, C) -> the same.

    Args:
        x: (B, H, W, C), contiguous.
        weights: Of the input's layer (2 C, C), of W_c, of V's and of the gate's (C, C), and of the
            norm (C,).
        biases: Of the same.
        kernel: (2 C, 1, 3, 3), of the convolution.
        own: Its bias, (2 C,).
        factors: Read and write, (m, H, W) each.
        eps: Of the norm.
    """
    y: Tensor = torch.ops.mixerlab.star_mixer(
        x, weights, biases, kernel, own, factors[0].contiguous(), factors[1].contiguous(), eps
    )
    return y


def register() -> None:
    """Tell torch what the operator is on "meta" and in a count."""
    torch.library.register_fake(NAME, _fake)
    register_flop_formula(torch.ops.mixerlab.star_mixer)(_flops)


def _fake(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


def _flops(
    x_shape: Any, weights: Any, biases: Any, kernel: Any, own: Any, read: Any, *_: Any, **__: Any
) -> int:
    """Two per multiply-add, as torch counts the same operations one by one."""
    batch, height, width, dim = x_shape
    count, rank = height * width, read[0]
    tokens = count * (4 * dim * dim + 2 * dim * kernel[2] * kernel[3] + 2 * rank * dim)
    return int(2 * batch * (tokens + rank * dim * dim))
