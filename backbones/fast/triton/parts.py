"""Parts of the Triton kernels: functions of numbers, reads of maps, sizes of programs.

A program takes a tile of columns and channels and walks down some lines of one image. It reads
every line three times, shifted by a column, and adds it to the three lines of a 3x3 convolution
that it belongs to, so that two sums are carried from line to line and no input. Numbers are
computed in float32, or in float64 where tensors are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_COLUMNS, MAX_CHANNELS, MAX_LINES = 16, 64, 16
ENOUGH_PROGRAMS = 512  # a few for every multiprocessor of a large GPU


@dataclass(frozen=True)
class Programs:
    """Grid and sizes of the programs that share a map of several images."""

    grid: tuple[int, int]
    lines: int
    strips: int
    tiles: int
    columns: int
    channels: int


def share_out(batch: int, size: tuple[int, int], channels: int) -> Programs:
    """Return programs for a map: long walks if there are many images, short ones otherwise."""
    height, width = size
    columns = min(MAX_COLUMNS, triton.next_power_of_2(width))
    block = min(MAX_CHANNELS, triton.next_power_of_2(channels))
    tiles, blocks = triton.cdiv(width, columns), triton.cdiv(channels, block)
    lines = min(MAX_LINES, height)
    while lines > 2 and batch * tiles * blocks * triton.cdiv(height, lines) < ENOUGH_PROGRAMS:
        lines = triton.cdiv(lines, 2)
    strips = triton.cdiv(height, lines)
    return Programs((batch * strips * tiles, blocks), lines, strips, tiles, columns, block)


def accumulator(dtype: torch.dtype) -> tl.dtype:
    """Return the type in which numbers of this type are computed."""
    return tl.float64 if dtype is torch.float64 else tl.float32


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """Return the type of partial sums of numbers of this type."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def image_stride(maps: Tensor) -> int:
    """Return the stride between images of maps (B, N, C) whose channels are contiguous."""
    assert maps.stride(-1) == 1
    return maps.stride(0)


@triton.jit
def gelu(x):
    """Return x Phi(x)."""
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def gelu_slope(x):
    """Return the derivative of ``gelu``."""
    normal = tl.exp(-0.5 * x * x) * 0.3989422804014327
    return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * normal


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def place(LINES, STRIPS, TILES, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr):
    """Return image, first line, columns and channels of this program."""
    program = tl.program_id(0)
    tile = program % TILES
    strip = (program // TILES) % STRIPS
    image = (program // (TILES * STRIPS)).to(tl.int64)
    x = tile * COLUMNS + tl.arange(0, COLUMNS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    return image, strip * LINES, x, channel


@triton.jit
def inside(y, x, channel, top, bottom, width, hidden):
    """Return a mask of the numbers of a line that exist, (columns, channels)."""
    columns = (x >= 0) & (x < width) & (y >= top) & (y < bottom)
    return columns[:, None] & (channel < hidden)[None, :]


@triton.jit
def address(y, x, channel, width, stride):
    """Return the offsets of a line from the first number of its image."""
    return (y * width + x)[:, None] * stride + channel[None, :]


@triton.jit
def row(values, channel, hidden, ACC: tl.constexpr):
    """Load one number per channel, (1, channels)."""
    return tl.load(values + channel, mask=channel < hidden, other=0.0).to(ACC)[None, :]


@triton.jit
def taps(kernel, first, channel, hidden, ACC: tl.constexpr):
    """Load three weights in a line of kernels (h, 1, 3, 3), (1, channels) each."""
    at, mask = kernel + channel * 9 + first, channel < hidden
    left = tl.load(at, mask=mask, other=0.0).to(ACC)[None, :]
    mid = tl.load(at + 1, mask=mask, other=0.0).to(ACC)[None, :]
    right = tl.load(at + 2, mask=mask, other=0.0).to(ACC)[None, :]
    return left, mid, right
