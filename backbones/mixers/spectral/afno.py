"""Adaptive Fourier neural operator: the same small network for every frequency of a map.

    y = x + IFFT2(S_lambda(W2 ReLU(W1 FFT2(x) + b1) + b2))

W1 and W2 are complex and block-diagonal. ReLU and the soft threshold S_lambda act on real and
imaginary parts alone.

Source: Guibas et al., "Adaptive Fourier Neural Operators: Efficient Token Mixers for
Transformers", ICLR 2022, https://arxiv.org/abs/2111.13587, whose pseudo-code adds x. The paper
leaves the scale of the transforms, the threshold and the initialisation open; here they are
orthonormal, 0.01 and normal of 0.02, as the authors released.

Axes: B images, H W map, F = W // 2 + 1 columns of the half spectrum, k blocks of p channels.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.bounds import check_divisor, check_range
from backbones.mixer import Mixer
from backbones.registry import register_mixer

MOST_BLOCKS = 8


@register_mixer("afno", kind="token", source="AFNO (ICLR 2022)")
class AdaptiveFourierOperator(Mixer):
    """x + IFFT2(S_lambda(W2 ReLU(W1 FFT2(x) + b1) + b2)) at any map size.

    Class tokens are not mixed: the host pools its map.

    Args:
        dim: Channels C.
        blocks: k, blocks of W1 and W2; by default the greatest common divisor of 8 and C.
        threshold: lambda, by which real and imaginary parts shrink towards zero.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters: 4 C^2 / k + 4 C.

    Raises:
        ValueError: Blocks that do not divide C, or a negative threshold.

    Source: AFNO (ICLR 2022), https://arxiv.org/abs/2111.13587.
    """

    def __init__(self, dim: int, *, blocks: int | None = None, threshold: float = 0.01) -> None:
        super().__init__()
        blocks = math.gcd(MOST_BLOCKS, dim) if blocks is None else blocks
        check_divisor("blocks", blocks, dim)
        check_range("threshold", threshold, 0)
        self.threshold = threshold
        width = dim // blocks
        self.fc1, self.fc2 = ComplexBlocks(blocks, width), ComplexBlocks(blocks, width)

    def mix(self, x: Tensor) -> Tensor:
        """Filter the spectrum and add x: (B, H, W, C) -> (B, H, W, C)."""
        precise = torch.promote_types(x.dtype, torch.float32)
        spectrum = torch.fft.rfft2(x.to(precise), dim=(1, 2), norm="ortho")
        parts = torch.view_as_real(spectrum).flatten(-2)  # (B, H, F, 2 C)
        hidden = F.relu(self.fc1(parts))
        # As a difference of two ReLUs, which all of torch's transforms differentiate.
        mapped = self.fc2(hidden)
        shrunk = F.relu(mapped - self.threshold) - F.relu(-mapped - self.threshold)
        spectrum = torch.view_as_complex(shrunk.to(precise).unflatten(-1, (-1, 2)))
        size = (x.shape[1], x.shape[2])
        return x + torch.fft.irfft2(spectrum, s=size, dim=(1, 2), norm="ortho").to(x.dtype)


class ComplexBlocks(nn.Module):
    """W x + b with k complex blocks: (..., 2 k p) -> (..., 2 k p), pairs of real and imaginary.

    Args:
        blocks: k.
        width: p.
    """

    no_weight_decay = ("bias",)

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.02 * torch.randn(blocks, width, width, 2))
        self.bias = nn.Parameter(0.02 * torch.randn(blocks, width, 2))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by W as a real matrix of twice the width."""
        real, imaginary = self.weight.to(x.dtype).unbind(-1)
        of_real = torch.stack([real, imaginary], dim=-1)
        of_imaginary = torch.stack([-imaginary, real], dim=-1)
        matrix = torch.stack([of_real, of_imaginary], dim=2).flatten(3).flatten(1, 2)
        blocks = x.unflatten(-1, (matrix.shape[0], -1))
        return torch.einsum("...kp,kpq->...kq", blocks, matrix).flatten(-2) + self.bias.flatten()
