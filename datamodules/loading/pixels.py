"""Bytes of images as floats: scaling, normalisation and random erasing of batches on any device."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def is_bytes(images: Any) -> bool:
    """Return True for a tensor of bytes."""
    return isinstance(images, Tensor) and images.dtype == torch.uint8


def scale_bytes(
    images: Tensor, most: float, mean: Sequence[float] = (0.0,), std: Sequence[float] = (1.0,)
) -> Tensor:
    """Return (bytes / most - mean) / std in float32, equal to the bit on all devices.

    Args:
        images: (..., C, H, W) of uint8.
        most: Byte that becomes 1.
        mean: Mean per channel, or one for all.
        std: Standard deviation per channel, or one for all.
    """
    scale, shift, width = _constants(most, tuple(mean), tuple(std), images.device)
    return images.float().div_(scale).sub_(shift).div_(width)


@functools.lru_cache(maxsize=64)
def _constants(
    most: float, mean: tuple[float, ...], std: tuple[float, ...], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    # Tensors, as CUDA multiplies by the reciprocal of a plain number, which rounds differently.
    with torch.inference_mode(False):
        columns = (torch.tensor(part, dtype=torch.float32)[:, None, None] for part in (mean, std))
        shift, width = (column.to(device) for column in columns)
        return torch.tensor(most, dtype=torch.float32).to(device), shift, width


def erase(images: Tensor, boxes: Tensor, seed: int | None) -> Tensor:
    """Return images with a rectangle each filled with normal noise per value, or with 0.

    Args:
        images: (B, C, H, W), normalised.
        boxes: (B, 4): top, left, height, width in pixels; sides of 0 erase nothing.
        seed: Seed of the noise; None fills with 0.
    """
    top, x_min, height, width = boxes.T[:, :, None]
    rows = torch.arange(images.shape[2], device=images.device)
    columns = torch.arange(images.shape[3], device=images.device)
    in_rows = (rows >= top) & (rows < top + height)
    in_columns = (columns >= x_min) & (columns < x_min + width)
    inside = in_rows[:, None, :, None] & in_columns[:, None, None, :]
    if seed is None:
        return images.masked_fill(inside, 0)
    device = images.device
    generator = torch.Generator(device).manual_seed(seed)
    noise = torch.randn(images.shape, generator=generator, device=device, dtype=images.dtype)
    return torch.where(inside, noise, images)
