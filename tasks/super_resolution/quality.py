"""PSNR and SSIM as the benchmarks of super-resolution measure them.

Images are rounded to 8 bits, borders of as many pixels as the scale are cropped, and the Y channel
is compared. Y is MATLAB's: from 16 to 235, not rounded.

Axes: H rows, W columns.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

WEIGHTS, BLACK = (65.481, 128.553, 24.966), 16.0  # of MATLAB's rgb2ycbcr
RANGE = 255.0
WINDOW, SIGMA = 11, 1.5
C1, C2 = (0.01 * RANGE) ** 2, (0.03 * RANGE) ** 2


def to_8_bits(image: Tensor) -> Tensor:
    """Round values from 0 to 1 to multiples of 1/255, in double precision."""
    return (image.detach().double().clamp(0, 1) * RANGE).round() / RANGE


def luma(image: Tensor) -> Tensor:
    """Return Y from 16 to 235: (3, H, W) of values from 0 to 1 -> (H, W)."""
    return torch.tensordot(image.new_tensor(WEIGHTS), image, dims=1) + BLACK


def compared(enlarged: Tensor, truth: Tensor, scale: int) -> tuple[Tensor, Tensor]:
    """Return Y of both images without their borders.

    Args:
        enlarged: (3, H, W), values from 0 to 1.
        truth: (3, H, W), values from 0 to 1.
        scale: Width of the border.

    Raises:
        ValueError: Shapes differ, or the border takes everything.
    """
    if enlarged.shape != truth.shape:
        raise ValueError(
            f"the enlarged image is {tuple(enlarged.shape)}, but the true one is "
            f"{tuple(truth.shape)}"
        )
    if min(truth.shape[1:]) < 2 * scale + WINDOW:
        height, width = truth.shape[1:]
        raise ValueError(
            f"PSNR and SSIM need images of {2 * scale + WINDOW} pixels and more for a border of "
            f"{scale}; got {width}x{height}"
        )
    inner = slice(scale, -scale)
    image1, image2 = (luma(to_8_bits(image))[inner, inner] for image in (enlarged, truth))
    return image1, image2


def psnr(first: Tensor, second: Tensor) -> Tensor:
    """Return 10 log10(255^2 / mean squared difference) in dB of two maps (H, W)."""
    return 10 * torch.log10(RANGE**2 / (first - second).square().mean())


def ssim(first: Tensor, second: Tensor) -> Tensor:
    """Return the mean structural similarity of two maps (H, W) over all whole windows.

    Source: Wang et al., "Image Quality Assessment", IEEE TIP 2004, Eq. 13, and the authors'
    ssim_index.m.
    """
    place = torch.arange(WINDOW, dtype=first.dtype, device=first.device) - WINDOW // 2
    kernel = torch.exp(-(place**2) / (2 * SIGMA**2))
    kernel = kernel / kernel.sum()
    maps = torch.stack([first, second, first * first, second * second, first * second])[:, None]
    maps = F.conv2d(maps, kernel.view(1, 1, -1, 1))
    mean1, mean2, square1, square2, product = F.conv2d(maps, kernel.view(1, 1, 1, -1))[:, 0]
    variances = square1 - mean1**2 + square2 - mean2**2
    covariance = product - mean1 * mean2
    products = (2 * mean1 * mean2 + C1) * (2 * covariance + C2)
    return (products / ((mean1**2 + mean2**2 + C1) * (variances + C2))).mean()
