"""Filters of a whole map in its spectrum.

Source: Rao et al., "Global Filter Networks for Image Classification", NeurIPS 2021,
https://arxiv.org/abs/2107.00645.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from backbones.layers.graph_sizes import is_exporting


def filter_spectrum(x: Tensor, weights: Tensor) -> Tensor:
    """Return irfft2(K * rfft2(x)) with orthonormal transforms, for each channel.

    Args:
        x: (B, H, W, C); half precision is transformed in float32, as FFTs lack it.
        weights: K as pairs (H, W // 2 + 1, C, 2) of real and imaginary parts.

    Returns:
        (B, H, W, C) in the type of x.
    """
    precise = torch.promote_types(x.dtype, torch.float32)
    if is_exporting():
        return filter_by_matrices(x.to(precise), weights.to(precise)).to(x.dtype)
    spectrum = torch.fft.rfft2(x.to(precise), dim=(1, 2), norm="ortho")
    spectrum = spectrum * torch.view_as_complex(weights.to(precise))
    size = (x.shape[1], x.shape[2])
    return torch.fft.irfft2(spectrum, s=size, dim=(1, 2), norm="ortho").to(x.dtype)


def filter_by_matrices(x: Tensor, weights: Tensor) -> Tensor:
    """Return ``filter_spectrum`` by products with matrices of cosines and sines, for ONNX."""
    height, width = x.shape[1], x.shape[2]
    rows = fourier_matrices(height, height, x)
    columns = fourier_matrices(width // 2 + 1, width, x)
    real, imaginary = weights.unbind(-1)
    a, b = (part @ x for part in columns)  # (B, H, F, C)
    a, b = _transform_rows(rows, a, b)
    a, b = a * real - b * imaginary, a * imaginary + b * real
    a, b = _transform_rows((rows[0], -rows[1]), a, b)
    # Columns between the first and the middle one stand for their mirror images as well.
    at = torch.arange(width // 2 + 1, device=x.device)
    counts = 2 - ((at == 0) | (2 * at == width)).to(x.dtype)
    cosines, sines = (counts * part.mT for part in columns)
    return (cosines @ a + sines @ b) / (height * width)


def fourier_matrices(count: int, length: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the parts of e^(-2 pi i f t / n), f below ``count``, t below n: (count, n) each."""
    frequency, place = (torch.arange(side, device=x.device) for side in (count, length))
    period = place.new_full((), length)  # ONNX takes remainders by tensors alone
    angle = (2 * math.pi / length) * (frequency.unsqueeze(1) * place % period).to(x.dtype)
    return angle.cos(), -angle.sin()


def _transform_rows(matrix: tuple[Tensor, Tensor], a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply the columns of a + ib with a complex matrix (H, H): (B, H, F, C) -> the same."""
    real, imaginary = matrix
    a, b = a.transpose(1, 2), b.transpose(1, 2)
    turned = (real @ a - imaginary @ b, real @ b + imaginary @ a)
    return turned[0].transpose(1, 2), turned[1].transpose(1, 2)


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
