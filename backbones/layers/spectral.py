"""Filters of a whole map in its spectrum.

Source: Rao et al., "Global Filter Networks for Image Classification", NeurIPS 2021,
https://arxiv.org/abs/2107.00645.
"""

from __future__ import annotations

import torch
from torch import Tensor


def filter_spectrum(x: Tensor, weights: Tensor) -> Tensor:
    """Return irfft2(K * rfft2(x)) with orthonormal transforms, for each channel.

    Args:
        x: (B, H, W, C); half precision is transformed in float32, as FFTs lack it.
        weights: K as pairs (H, W // 2 + 1, C, 2) of real and imaginary parts.

    Returns:
        (B, H, W, C) in the type of x.
    """
    precise = torch.promote_types(x.dtype, torch.float32)
    spectrum = torch.fft.rfft2(x.to(precise), dim=(1, 2), norm="ortho")
    spectrum = spectrum * torch.view_as_complex(weights.to(precise))
    size = (x.shape[1], x.shape[2])
    return torch.fft.irfft2(spectrum, s=size, dim=(1, 2), norm="ortho").to(x.dtype)


def filter_matrix(weights: Tensor, size: tuple[int, int]) -> Tensor:
    """Return a filter as matrices over tokens: those of circular convolutions.

    Args:
        weights: K as pairs (H, W // 2 + 1, C, 2) of real and imaginary parts.
        size: (H, W).

    Returns:
        (C, N, N), N = H W tokens in row-major order, rows the tokens written.
    """
    precise = torch.promote_types(weights.dtype, torch.float32)
    kernel = torch.fft.irfft2(torch.view_as_complex(weights.to(precise)), s=size, dim=(0, 1))
    rows, columns = (torch.arange(side, device=weights.device) for side in size)
    up, along = ((at[:, None] - at) % len(at) for at in (rows, columns))
    matrix = kernel[up[:, None, :, None], along[None, :, None, :]]  # (H, W, H, W, C)
    return matrix.flatten(2, 3).flatten(0, 1).movedim(-1, 0)
