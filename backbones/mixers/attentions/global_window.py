"""Global query attention of GC ViT: one map of queries for all windows.

    y = W softmax(q_g k^T / sqrt d + B) v within each window

The queries q_g are a map of one window's size, the same in all windows of an image: the input,
convolved and pooled to about the window's size, then resized to it (bicubic).

Source: Hatamizadeh et al., "Global Context Vision Transformers", ICML 2023,
https://arxiv.org/abs/2206.09959. In the paper the query is computed once per stage and from the
stage's input; here each mixer computes its own from its own input. Maps are padded with zeros to
whole windows, where padding attends. Both parts are timm's, as in the host GC ViT.

onnxruntime does not run its resized queries; export it to torch_export.

Axes: B images, H W map, C channels, w side of a window.
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from timm.models.gcvit import FeatureBlock, WindowAttentionGlobal
from timm.models.swin_transformer import window_partition, window_reverse
from torch import Tensor

from backbones.layers.axes import to_nchw, to_nhwc
from backbones.layers.bounds import check_range
from backbones.layers.heads import usual_heads
from backbones.layers.init import init_linear
from backbones.layers.shifted_windows import Size, pad_to_windows
from backbones.mixer import Mixer
from backbones.registry import register_mixer


def resize_query(pooled: Tensor, window: Size) -> Tensor:
    """Resize a pooled map (B, C, h, w) to a window's size (bicubic)."""
    if pooled.shape[-2:] == window:
        return pooled
    return F.interpolate(pooled, window, mode="bicubic", align_corners=False)


@register_mixer("global_window", kind="token", source="GC ViT (ICML 2023)")
class GlobalWindowAttention(Mixer):
    """W softmax(q_g k^T / sqrt d + B) v; class tokens are not mixed: the host pools its map.

    Args:
        dim: Channels C, at least 4.
        grid: Map size, by which the number of poolings follows.
        window: w, side of a window.
        num_heads: h, a divisor of C; by default as many as leave each 32 channels or more.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters with one pooling or none:
    4.5 C^2 + 12 C + h (2 w - 1)^2, at multiples of 32.

    Raises:
        ValueError: A window below 2, or heads that do not divide C.

    Source: GC ViT (ICML 2023), https://arxiv.org/abs/2206.09959.
    """

    # The authors mark it; their released optimiser misses the mark, since it looks for other names.
    no_weight_decay = ("attn.rel_pos.relative_position_bias_table",)

    def __init__(
        self, dim: int, *, grid: Size, window: int = 7, num_heads: int | None = None
    ) -> None:
        super().__init__()
        check_range("window", window, 2)
        self.window = (window, window)
        poolings = max(0, int(math.log2(min(grid) / window)))
        self.global_block = FeatureBlock(dim, poolings)
        heads = usual_heads(dim, num_heads)
        self.attn = WindowAttentionGlobal(dim, heads, self.window, use_global=True)
        self.apply(init_linear)

    def mix(self, x: Tensor) -> Tensor:
        """Attend in each window by the global queries: (B, H, W, C) -> (B, H, W, C)."""
        query = to_nhwc(resize_query(self.global_block(to_nchw(x)), self.window))
        x, crop = pad_to_windows(x, self.window)
        windows = window_partition(x, self.window).flatten(1, 2)
        mixed: Tensor = self.attn(windows, query).unflatten(1, self.window)
        return crop(window_reverse(mixed, self.window, x.shape[1], x.shape[2]))
