"""Layouts in which timm's blocks pass their map to a mixer, and their conversion to (B, h, w, C).

Axes: B images, h x w map, C channels, P prefix tokens, T windows of S x S places, N = h * w.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from backbones.layers.axes import to_nchw, to_nhwc
from backbones.layers.eager import is_recording
from backbones.layers.graph_sizes import ceil_div

Size = tuple[int, int]
Folded = tuple[Tensor, Tensor | None]  # the map (B, h, w, C), and prefix tokens (B, P, C) if any


class Frame:
    """Size of the images that a network is looking at, which its tokens do not tell.

    Threads may run one network on images of different sizes.

    Args:
        image: (H, W) of the build resolution.
        is_fixed: True if the network takes images of one size only.
    """

    def __init__(self, image: Size, is_fixed: bool = False) -> None:
        self._last, self.is_fixed = image, is_fixed
        self._of_thread: dict[int, Size] = {}
        # By stride and number of tokens, for blocks that compute again in the backward pass.
        self._seen: dict[tuple[int, int], Size] = {}

    @property
    def image(self) -> Size:
        """(H, W) of the current pass."""
        if torch.compiler.is_compiling():
            return self._last
        return self._of_thread.get(threading.get_ident(), self._last)

    @image.setter
    def image(self, size: Size) -> None:
        self._last = size
        if not torch.compiler.is_compiling():
            self._of_thread[threading.get_ident()] = size

    def grid(self, stride: int, tokens: int) -> Size:
        """Return the size (h, w) of a map of so many tokens at a stride in pixels."""
        height, width = self.image
        size = ceil_div(height, stride), ceil_div(width, stride)
        if is_recording() or size[0] * size[1] == tokens:
            if not is_recording():
                self._seen[stride, tokens] = size
            return size
        return self._seen[stride, tokens]


@dataclass(frozen=True)
class Place:
    """Where a map lies: its stride, and its size if that cannot change.

    Attributes:
        stride: Input pixels per row and column.
        size: (h, w) at the build resolution.
        frame: The network's.
    """

    stride: int
    size: Size
    frame: Frame

    def grid(self, tokens: int) -> Size:
        """Return (h, w) of a map of so many tokens."""
        return self.size if self.frame.is_fixed else self.frame.grid(self.stride, tokens)

    def grid_of_images(self) -> Size:
        """Return (h, w) for the images of the current pass."""
        if self.frame.is_fixed:
            return self.size
        height, width = self.frame.image
        return ceil_div(height, self.stride), ceil_div(width, self.stride)


@dataclass(frozen=True)
class Layout:
    """(B, h, w, C), the layout of mixers."""

    place: Place
    prefix: int = 0

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return True if a tensor of this shape can have the layout in the current pass."""
        return len(shape) == 4 and shape[1:3] == self.place.grid_of_images()

    def fold(self, x: Tensor) -> Folded:
        """Return the map, and the prefix tokens if there are any."""
        return x, None

    def unfold(self, x: Tensor, prefix: Tensor | None, like: Tensor) -> Tensor:
        """Return a mixed map in the layout of ``like``, which was folded."""
        return x


class ChannelsFirst(Layout):
    """(B, C, h, w)."""

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return True for (B, C, h, w)."""
        return len(shape) == 4 and shape[2:] == self.place.grid_of_images()

    def fold(self, x: Tensor) -> Folded:
        """Return the map."""
        return to_nhwc(x), None

    def unfold(self, x: Tensor, prefix: Tensor | None, like: Tensor) -> Tensor:
        """Return (B, C, h, w)."""
        return to_nchw(x)


class TokenSequence(Layout):
    """(B, P + h * w, C): prefix tokens, then the map row by row."""

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return True for (B, P + h * w, C)."""
        tokens = math.prod(self.place.grid_of_images())
        return len(shape) == 3 and shape[1] == self.prefix + tokens

    def fold(self, x: Tensor) -> Folded:
        """Return map and prefix tokens."""
        patches = x[:, self.prefix :]
        grid = self.place.grid(patches.shape[1])
        return patches.unflatten(1, grid), x[:, : self.prefix] if self.prefix else None

    def unfold(self, x: Tensor, prefix: Tensor | None, like: Tensor) -> Tensor:
        """Return (B, P + h * w, C)."""
        x = x.flatten(1, 2)
        return x if prefix is None else torch.cat([prefix, x], dim=1)


class TransposedTokens(Layout):
    """(B, C, h * w)."""

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return True for (B, C, h * w)."""
        return len(shape) == 3 and shape[2] == math.prod(self.place.grid_of_images())

    def fold(self, x: Tensor) -> Folded:
        """Return the map."""
        return x.transpose(1, 2).unflatten(1, self.place.grid(x.shape[2])), None

    def unfold(self, x: Tensor, prefix: Tensor | None, like: Tensor) -> Tensor:
        """Return (B, C, h * w)."""
        return x.flatten(1, 2).transpose(1, 2)


@dataclass(frozen=True)
class Windows(Layout):
    """Windows of S x S places, of a map that is padded at the right and bottom.

    (B * T, S * S, C), (B * T, S, S, C), or (B, T, S * S, C).
    """

    side: Size = (1, 1)

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return True for windows of this size, as many as the map has."""
        height, width = self.place.grid_of_images()
        count = ceil_div(height, self.side[0]) * ceil_div(width, self.side[1])
        flat = math.prod(self.side)
        if len(shape) == 4 and shape[1:3] == (count, flat):
            return True
        return shape[1:-1] in ((flat,), self.side) and shape[0] % count == 0

    def fold(self, x: Tensor) -> Folded:
        """Return the map without padding."""
        height, width = self.place.grid_of_images()
        rows, columns = ceil_div(height, self.side[0]), ceil_div(width, self.side[1])
        x = x.reshape(-1, rows, columns, *self.side, x.shape[-1]).transpose(2, 3)
        return x.flatten(3, 4).flatten(1, 2)[:, :height, :width], None

    def unfold(self, x: Tensor, prefix: Tensor | None, like: Tensor) -> Tensor:
        """Return the windows of the padded map."""
        height, width = x.shape[1:3]
        rows, columns = ceil_div(height, self.side[0]), ceil_div(width, self.side[1])
        x = F.pad(x, (0, 0, 0, columns * self.side[1] - width, 0, rows * self.side[0] - height))
        x = x.unflatten(2, (columns, self.side[1])).unflatten(1, (rows, self.side[0]))
        return x.transpose(2, 3).reshape(like.shape)


@dataclass(frozen=True)
class PatchPositions(Layout):
    """One token per patch of S x S places, for each of the S * S positions within a patch.

    (B * S * S, T, C) of MobileViT, or with channels first (B, C, S * S, T) of its second version.
    """

    side: Size = (1, 1)
    channels_first: bool = False

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return True for as many patches and positions as the map has."""
        (rows, columns), (patch_height, patch_width) = self._shape(*self.place.grid_of_images())
        if self.channels_first:
            return shape[2:] == (patch_height * patch_width, rows * columns)
        return shape[1:-1] == (rows * columns,) and shape[0] % (patch_height * patch_width) == 0

    def fold(self, x: Tensor) -> Folded:
        """Return the map."""
        height, width = self.place.grid_of_images()
        (rows, columns), (patch_height, patch_width) = self._shape(height, width)
        if self.channels_first:
            x = x.flatten(2).transpose(1, 2)
        x = x.reshape(-1, patch_height, patch_width, rows, columns, x.shape[-1])
        return x.permute(0, 3, 1, 4, 2, 5).flatten(3, 4).flatten(1, 2), None

    def unfold(self, x: Tensor, prefix: Tensor | None, like: Tensor) -> Tensor:
        """Return the tokens of every position."""
        (rows, columns), (patch_height, patch_width) = self._shape(*x.shape[1:3])
        x = (
            x.unflatten(2, (columns, patch_width))
            .unflatten(1, (rows, patch_height))
            .permute(0, 2, 4, 1, 3, 5)
        )
        if self.channels_first:
            return x.flatten(1, 4).transpose(1, 2).reshape(like.shape)
        return x.reshape(like.shape)

    def _shape(self, height: int, width: int) -> tuple[Size, Size]:
        patch_height, patch_width = self.side
        return (ceil_div(height, patch_height), ceil_div(width, patch_width)), self.side


@dataclass(frozen=True, eq=False)
class Permuted(Layout):
    """(B, h * w, C) in another order than row by row, at one size.

    Attributes:
        order: Position in the tokens of each place of the map, row by row.
    """

    order: Any = None

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return True for (B, h * w, C)."""
        return len(shape) == 3 and shape[1] == len(self.order)

    def fold(self, x: Tensor) -> Folded:
        """Return the map."""
        return x[:, self.order.to(x.device)].unflatten(1, self.place.size), None

    def unfold(self, x: Tensor, prefix: Tensor | None, like: Tensor) -> Tensor:
        """Return the tokens in their order."""
        back = torch.argsort(self.order)
        return x.flatten(1, 2)[:, back.to(x.device)]
