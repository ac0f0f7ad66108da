"""FFNified attention: self-attention's slots filled with the FFN's operations.

    y = V(GELU(K(BN(W x)))), K and V depthwise convolutions

The keys and values of a channel are its two kernels, static instead of projected; GELU takes the
place of softmax, and a sliding window that of all pairs of tokens. It never expands the channels.

Source: Yun et al., "FFNet: MetaMixer-based Efficient Convolutional Mixer Design",
https://arxiv.org/abs/2406.02021, Sec. 3.2 and Fig. 3b; the train-time branches: App. E and, for
strips, App. F.1.
"""

from __future__ import annotations

from typing import Literal

from backbones.layers.init import init_all
from backbones.layers.reparam import ConvBN, Kernel, depthwise
from backbones.mixers.metamixer.instances import convolutional
from backbones.mixers.metamixer.query_key_value import MetaMixer
from backbones.registry import register_mixer

Branches = Literal["none", "small", "strips"]
MIN_BRANCHED = 5  # smaller kernels get no small branch beside them
MARGIN = 4  # by how much the small branch is smaller: 3x3 beside 7x7, 5x5 beside 9x9


@register_mixer(
    "ffnified",
    kind="token",
    source="FFNet (2024), Sec. 3.2 and Fig. 3b: FFNified attention",
)
def ffnified(dim: int, *, kernel_size: int = 7, branches: Branches = "small") -> MetaMixer:
    """Build V(GELU(K(BN(W x)))) with a 1x1 convolution W and depthwise K and V.

    Args:
        dim: Channels C.
        kernel_size: k, side of K and V, odd.
        branches: Kernels trained next to the k x k ones, which ``layers.reparam.fuse`` folds in:
            "small" a square of side k - 4, each kernel with its BatchNorm (up to 3x3 a plain
            convolution with bias, as in the first stages of FFNet); "strips" also 1 x k and k x 1,
            at every size (as in FFNet_seg); "none" nothing: plain convolutions with bias.

    Shape: (B, H, W, C) -> (B, H, W, C). Parameters without branches: C^2 + 2 C + 2 C (k^2 + 1).

    Raises:
        ValueError: An even kernel.

    Source: FFNet (2024), Sec. 3.2, https://arxiv.org/abs/2406.02021.
    """
    kernels = branch_kernels(kernel_size, branches)
    mixer = convolutional(
        ConvBN(dim, dim),
        depthwise(dim, kernel_size, kernels),
        depthwise(dim, kernel_size, kernels),
    )
    init_all(mixer)
    return mixer


def branch_kernels(kernel_size: int, branches: Branches) -> tuple[Kernel, ...] | None:
    """Return the kernels beside the k x k one; None for a plain convolution with bias."""
    small = kernel_size - MARGIN
    square: tuple[Kernel, ...] = ((small, small),) if kernel_size >= MIN_BRANCHED else ()
    if branches == "strips":
        return ((1, kernel_size), (kernel_size, 1), *square)
    return square if square and branches == "small" else None
