"""Locally-grouped and global sub-sampled attention in alternation, as in Twins-SVT.

    even blocks: y = W softmax(q k^T / sqrt d) v within windows
    odd blocks:  the same over the whole map, with the keys and values of a reduced one

Source: Chu et al., "Twins: Revisiting the Design of Spatial Attention in Vision Transformers",
NeurIPS 2021, https://arxiv.org/abs/2104.13840, Sec. 3.2; windows of 7, reductions and
initialisation as in the authors' code. Windows at the lower and right border are padded with zeros,
which attend.

Axes: B images, H W map, C channels, w side of a window.
"""

from __future__ import annotations

import torch.nn.functional as F
from timm.models.swin_transformer import window_partition, window_reverse
from torch import Tensor, nn

from backbones.layers.bounds import check_range
from backbones.layers.heads import merge_heads, split_heads, usual_heads
from backbones.layers.init import init_fan_out
from backbones.layers.shifted_windows import pad_to_windows
from backbones.mixer import Mixer
from backbones.mixers.attentions.sra import REDUCTIONS, SpatialReductionAttention
from backbones.registry import register_mixer
from backbones.slots import Slot


class LocallyGroupedAttention(Mixer):
    """Attention within windows without positions: (B, H, W, C) -> (B, H, W, C).

    Args:
        dim: Channels C.
        num_heads: Heads, a divisor of C.
        window: w.
    """

    def __init__(self, dim: int, num_heads: int, window: int) -> None:
        super().__init__()
        self.num_heads, self.window = num_heads, (window, window)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        init_fan_out(self)

    def mix(self, x: Tensor) -> Tensor:
        """Attend within windows: (B, H, W, C) -> (B, H, W, C)."""
        x, crop = pad_to_windows(x, self.window)
        windows = window_partition(x, self.window).flatten(1, 2)
        q, k, v = (split_heads(part, self.num_heads) for part in self.qkv(windows).chunk(3, -1))
        mixed = merge_heads(F.scaled_dot_product_attention(q, k, v)).unflatten(1, self.window)
        return self.proj(crop(window_reverse(mixed, self.window, x.shape[1], x.shape[2])))


@register_mixer("lsa_gsa", kind="token", source="Twins (NeurIPS 2021), Sec. 3.2")
class TwinsAttention(Mixer):
    """Attention within windows in even blocks, to a reduced map in odd ones.

    Class tokens are not mixed: the host pools its map.

    Args:
        dim: Channels C.
        slot: Place in the host; its block selects the attention, its stage the reduction.
        window: w, side of a window.
        reduction: s, side of the windows that become one key; by default 8, 4, 2 or 1 by stage.
        num_heads: Heads, a divisor of C; by default as many as leave each 32 channels or more.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters: 4 C^2 + 4 C; in odd blocks with
    s > 1 also s^2 C^2 + 3 C.

    Raises:
        ValueError: A window or reduction below 1, or heads that do not divide C.

    Source: Twins (NeurIPS 2021), Sec. 3.2, https://arxiv.org/abs/2104.13840.
    """

    def __init__(
        self,
        dim: int,
        *,
        slot: Slot | None = None,
        window: int = 7,
        reduction: int | None = None,
        num_heads: int | None = None,
    ) -> None:
        super().__init__()
        stage, block = (slot.stage, slot.block) if slot else (0, 0)
        side = REDUCTIONS[min(stage, 3)] if reduction is None else reduction
        check_range("window", window, 1)
        check_range("reduction", side, 1)
        heads = usual_heads(dim, num_heads)
        self.attn: Mixer
        if block % 2:
            self.attn = SpatialReductionAttention(dim, heads, side)
        else:
            self.attn = LocallyGroupedAttention(dim, heads, window)

    def mix(self, x: Tensor) -> Tensor:
        """Attend within windows, or to the reduced map: (B, H, W, C) -> (B, H, W, C)."""
        return self.attn.mix(x)
