"""Attention within square windows, shifted in every second block or not: Swin's token mixer.

    y = W softmax(q k^T / sqrt d + B) v within each window

B is read from a table by the offset of two tokens. The host Swin uses the same attention.

Source: Liu et al., "Swin Transformer", ICCV 2021, https://arxiv.org/abs/2103.14030, Sec. 3.2, Eq. 3
and 4, Fig. 4; order of padding and rolling, and initialisation, as in the authors' code.

Axes: B images, H W map, h w window, C channels.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from timm.models.swin_transformer import WindowAttention, window_partition, window_reverse
from torch import Tensor

from backbones.layers.bounds import check_range
from backbones.layers.graph_sizes import is_any_size, missing
from backbones.layers.heads import usual_heads
from backbones.layers.init import init_linear
from backbones.layers.shifted_windows import AnyLength, Size, mask_of_regions, shift_mask
from backbones.mixer import Mixer
from backbones.registry import register_mixer
from backbones.slots import Slot


class AnyWindowAttention(WindowAttention):
    """timm's window attention on maps of any size, in windows up to the size of its bias table."""

    no_weight_decay = ("relative_position_bias_table",)

    def attend(self, x: Tensor, shift: int, shift_single_window: bool) -> Tensor:
        """Attend within the windows of a map: (B, H, W, C) -> (B, H, W, C).

        The map is padded, then rolled, in the order of the authors' code. A map smaller than a
        window is one window of its own size.

        Args:
            x: (B, H, W, C).
            shift: Tokens by which both axes roll; an axis of one window stays.
            shift_single_window: True to also roll an axis of exactly one window.
        """
        _, height, width, channels = x.shape
        if is_any_size(x.shape[1:3]):
            return self._attend_any_size(x, shift, shift_single_window)
        side = cast("Size", self.window_size)[0]
        (window_h, shift_h), (window_w, shift_w) = (
            (min(side, size), shift if size > side - shift_single_window else 0)
            for size in (height, width)
        )
        window, shifts = (window_h, window_w), (shift_h, shift_w)
        x = F.pad(x, (0, 0, 0, missing(width, window_w), 0, missing(height, window_h)))
        padded = (x.shape[1], x.shape[2])
        if any(shifts):
            x = torch.roll(x, (-shift_h, -shift_w), dims=(1, 2))
        windows = window_partition(x, window).flatten(1, 2)
        mask = shift_mask(padded, window, shifts, x.device, x.dtype) if any(shifts) else None
        windows = self(windows, window, mask)
        x = window_reverse(windows.reshape(-1, *window, channels), window, *padded)
        if any(shifts):
            x = torch.roll(x, shifts, dims=(1, 2))
        return x[:, :height, :width]

    def _attend_any_size(self, x: Tensor, shift: int, shift_single_window: bool) -> Tensor:
        """Attend in windows without a branch on sizes, for graphs of any size."""
        _, height, width, channels = x.shape
        side = cast("Size", self.window_size)[0]
        window = (side, side)
        rows, columns = (
            AnyLength(size, side, shift, shift_single_window, x.device) for size in (height, width)
        )
        x = columns.roll(rows.roll(x, 1), 2)
        mask = mask_of_regions(rows.regions, columns.regions, window, x.dtype)
        windows = self(window_partition(x, window).flatten(1, 2), window, mask)
        x = windows.reshape(-1, *window, channels)
        x = window_reverse(x, window, rows.padded, columns.padded)
        return columns.unroll(rows.unroll(x, 1), 2)

    # timm's reads one window size for all maps from itself.
    def forward(  # type: ignore[override]
        self, x: Tensor, window: Size, mask: Tensor | None
    ) -> Tensor:
        """Attend within windows.

        Args:
            x: (num_windows * B, h * w, C), image by image.
            window: (h, w).
            mask: (num_windows, h * w, h * w), added to the logits.
        """
        num_tokens = x.shape[1]
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        bias = self._bias(window)
        if mask is not None:
            repeats = x.shape[0] // mask.shape[0]
            bias = (bias + mask[:, None]).repeat(repeats, 1, 1, 1)
        drop = self.attn_drop.p if self.training else 0.0
        query, key, value = qkv.unbind(0)
        x = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=drop)
        x = x.transpose(1, 2).reshape(-1, num_tokens, self.proj.in_features)
        return self.proj_drop(self.proj(x))

    def _bias(self, window: Size) -> Tensor:
        """Return the relative position bias (1, heads, h * w, h * w).

        A smaller window uses the same table, since offsets keep their meaning.
        """
        bias = self._get_rel_pos_bias()
        if window == self.window_size:
            return bias
        height, width = window
        bias = bias.unflatten(-1, self.window_size).unflatten(-3, self.window_size)
        return bias[:, :, :height, :width, :height, :width].flatten(4, 5).flatten(2, 3)


class WindowMixing(Mixer):
    """Attention within windows of any map; padding at the lower and right border attends as zeros.

    Args:
        dim: Channels C.
        window: w, side of a window, at least 2.
        num_heads: Heads, a divisor of C; by default as many as leave each 32 channels or more.
        shift: Tokens by which windows are shifted.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size.

    Raises:
        ValueError: A window below 2, or a number of heads that does not divide C.
    """

    def __init__(self, dim: int, window: int, num_heads: int | None, shift: int) -> None:
        super().__init__()
        check_range("window", window, 2)
        heads = usual_heads(dim, num_heads)
        self.attn = AnyWindowAttention(dim, heads, window_size=window)
        self.attn.apply(init_linear)
        self.shift = shift

    def mix(self, x: Tensor) -> Tensor:
        """Attend within windows: (B, H, W, C) -> (B, H, W, C)."""
        return self.attn.attend(x, self.shift, shift_single_window=False)


@register_mixer("window_attention", kind="token", source="Swin Transformer (2021), Eq. 4")
def window_attention(dim: int, *, window: int = 7, num_heads: int | None = None) -> WindowMixing:
    """Build attention within windows; class tokens are not mixed: the host pools its map.

    The table of relative positions belongs to the window, so a map of any size uses all of it.

    Args:
        dim: Channels C.
        window: w, side of a window, at least 2.
        num_heads: h, a divisor of C; by default as many as leave each 32 channels or more.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters: 4 C^2 + 4 C + h (2 w - 1)^2.

    Source: Swin Transformer (2021), Eq. 4, https://arxiv.org/abs/2103.14030.
    """
    return WindowMixing(dim, window, num_heads, shift=0)


@register_mixer("shifted_window", kind="token", source="Swin Transformer (2021), Sec. 3.2, Eq. 3")
def shifted_window(
    dim: int, *, slot: Slot | None = None, window: int = 7, num_heads: int | None = None
) -> WindowMixing:
    """Build attention within windows that are shifted by half of their side in odd blocks.

    Maps up to one window are not shifted. Class tokens are not mixed: the host pools its map.

    Args:
        dim: Channels C.
        slot: Place in the host; odd blocks shift.
        window: w, side of a window, at least 2.
        num_heads: h, a divisor of C; by default as many as leave each 32 channels or more.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters: 4 C^2 + 4 C + h (2 w - 1)^2.

    Source: Swin Transformer (2021), Sec. 3.2, https://arxiv.org/abs/2103.14030.
    """
    is_odd = slot is not None and slot.block % 2 == 1
    return WindowMixing(dim, window, num_heads, shift=window // 2 if is_odd else 0)
