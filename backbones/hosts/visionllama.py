"""Pyramid-VisionLLaMA S, B and L: LLaMA's block on Twins' pyramid, with rotary positions in 2-D.

As in Twins-SVT, blocks alternate between attention within windows of 7x7 and attention of all
tokens to keys and values of a reduced map. Both rotate queries and keys by their places. The FFN is
a SwiGLU without biases.

Source: Chu et al., "VisionLLaMA: A Unified LLaMA Backbone for Vision Tasks", ECCV 2024,
https://arxiv.org/abs/2403.00522; Chu et al., "Twins", NeurIPS 2021,
https://arxiv.org/abs/2104.13840 (pyramid). The released networks differ from the text as follows;
each difference is an option:

* Places of reduced keys are counted in rows of the full map: key n is at (b + s (n mod W),
  b + s (n div W)), with b = 1 - 1 / s and the width W of the full map (``key_places``).
* The final norm is applied twice, before and after the mean over tokens (``norm_twice``).
* The hidden width, 8 C / 3, is rounded up to a multiple of 256 (``hidden_multiple``), which raises
  the parameters of S from 24.0 to 25.9 M and of L from 99.2 to 104.7 M.
* Detectors divide places in global attention by H / 14, H the height of the stage's map
  (``auto_scale``).

Layer scales start at 1e-4, weights truncated normal with deviation 0.02. The released networks take
multiples of 32 pixels; here images are padded with zeros to a multiple of 4, and maps to whole
windows and patches.

Axes: B images, H W map, C channels, h heads of 32 channels.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from timm.models.swin_transformer import window_partition, window_reverse
from torch import Tensor, nn

from backbones.checkpoints.keys import rename
from backbones.hosts.scaffolds.hierarchical import HierarchicalBackbone, drop_path_rates
from backbones.hosts.scaffolds.prenorm_block import PreNormBlock
from backbones.hosts.scaffolds.timm_source import refuse_pretrained
from backbones.layers.axes import to_nchw, to_nhwc
from backbones.layers.bounds import check_range
from backbones.layers.graph_sizes import ceil_div, missing
from backbones.layers.init import init_all
from backbones.layers.patch_embed import PatchEmbed
from backbones.layers.rotary import Lattice, rotate
from backbones.layers.shifted_windows import pad_to_windows
from backbones.registry import register_host
from backbones.slots import HostConfig, Slot

HEAD_DIM = 32
WINDOW = 7
REDUCTIONS = (8, 4, 2, 1)  # s by stage
FFN_RATIO = 4.0  # hidden ratio of an FFN with the parameters of a SwiGLU of 8 C / 3 channels
LAYER_SCALE = 1e-4
SCALED_SIDE = 14  # rows of a map with unscaled places

KeyPlaces = Literal["released", "regular"]


class VisionLLaMA(HierarchicalBackbone):
    """Four maps at strides 4, 8, 16, 32; NHWC inside. A subclass sets ``widths`` and ``depths``.

    A channel mixer replaces the SwiGLU with a hidden ratio of 4, that of an FFN of its size. Dense:
    a LayerNorm for each map.

    Args:
        config: See ``HostConfig``.
        key_places: "released" as above, "regular" with the width of the reduced map.
        norm_twice: Apply the final norm again after the mean.
        hidden_multiple: Round the hidden width of the SwiGLU up to a multiple of this.
        auto_scale: Divide places in global attention by H / 14; None: in dense prediction.

    Source: VisionLLaMA, https://arxiv.org/abs/2403.00522.
    """

    widths: tuple[int, ...]
    depths: tuple[int, ...]

    def __init__(
        self,
        config: HostConfig,
        *,
        key_places: KeyPlaces = "released",
        norm_twice: bool = True,
        hidden_multiple: int = 256,
        auto_scale: bool | None = None,
    ) -> None:
        super().__init__()
        refuse_pretrained("Pyramid-VisionLLaMA", config)
        check_range("hidden_multiple", hidden_multiple, 1)
        self.norm_twice = norm_twice
        self.set_maps(config, self.widths)
        reduced = partial(
            GlobalAttention,
            key_places=key_places,
            auto_scale=config.dense if auto_scale is None else auto_scale,
        )
        self.patch_embeds, self.blocks = nn.ModuleList(), nn.ModuleList()
        places: list[tuple[PreNormBlock, Slot]] = []
        rates = drop_path_rates(config.drop_path_rate, sum(self.depths))
        for stage, (dim, depth) in enumerate(zip(self.widths, self.depths, strict=True)):
            inputs, side = (self.widths[stage - 1], 2) if stage else (3, config.patch_size)
            self.patch_embeds.append(PatchEmbed(inputs, dim, side, side))
            init_all(self.patch_embeds[-1])
            grid = config.grid(self.feature_info[stage].stride)
            blocks = nn.Sequential()
            for index in range(depth):
                local = index % 2 == 0
                attn = WindowAttention(dim) if local else reduced(dim, REDUCTIONS[stage])
                mlp = BiasFreeSwiGLU(dim, hidden_multiple)
                block = PreNormBlock(
                    dim, nn.LayerNorm, attn, mlp, drop_path=rates.pop(0), layer_scale=LAYER_SCALE
                )
                init_all(block)
                slot = Slot(dim, FFN_RATIO, grid, stage, index, dense=config.dense)
                places.append((block, slot))
                blocks.append(block)
            self.blocks.append(blocks)
        for block, slot in places:  # last, so that the host's weights are those without mixers
            block.fill_slots(slot, config)

    def stage_maps(self, images: Tensor) -> list[Tensor]:
        """Return the four stage outputs (B, h, w, C) of images (B, 3, H, W), before any norm."""
        x = images.contiguous(memory_format=torch.channels_last)
        maps: list[Tensor] = []
        for embed, blocks in zip(self.patch_embeds, self.blocks, strict=True):
            maps.append(blocks(embed(x)))
            x = to_nchw(maps[-1])
        return maps

    def embed(self, images: Tensor) -> Tensor:
        """Norm the last map, average it and norm again: (B, 3, H, W) -> (B, num_features).

        Raises:
            ValueError: The backbone was built for dense prediction.
        """
        x = super().embed(images)
        return self.norm(x) if self.norm_twice else x

    def convert_state_dict(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rename the authors' classifier; all other names agree."""
        return rename(state_dict, [(r"^head\.", "classifier.")])


class WindowAttention(nn.Module):
    """Self-attention within windows of 7x7 tokens; the padding of maps attends as well.

    Shape: (B, H, W, C) -> (B, H, W, C). Parameters: 4 C^2 + 4 C.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.num_heads = dim // HEAD_DIM
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Attend within each window, with rotary places: (B, H, W, C) -> (B, H, W, C)."""
        window = (WINDOW, WINDOW)
        x, crop = pad_to_windows(x, window)
        height, width, channels = x.shape[1:]
        qkv = self.qkv(window_partition(x, window).flatten(1, 2)).unflatten(-1, (-1, HEAD_DIM))
        query_key, value = qkv.split([2 * self.num_heads, self.num_heads], dim=2)
        query, key = rotate(query_key, Lattice(WINDOW**2, WINDOW)).chunk(2, dim=2)
        x = attend(query, key, value).view(-1, *window, channels)
        return self.proj(crop(window_reverse(x, window, height, width)))


class GlobalAttention(nn.Module):
    """Attention of all tokens to keys and values from one token per s x s.

    Args:
        dim: Channels C.
        reduction: s.
        key_places: See ``VisionLLaMA``.
        auto_scale: Divide places by H / 14.

    Shape: (B, H, W, C) -> (B, H, W, C). Parameters: 4 C^2 + 4 C; s > 1 adds s^2 C^2 + 3 C.
    """

    def __init__(
        self, dim: int, reduction: int, *, key_places: KeyPlaces, auto_scale: bool
    ) -> None:
        super().__init__()
        self.reduction, self.key_places, self.auto_scale = reduction, key_places, auto_scale
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.proj = nn.Linear(dim, dim)
        self.sr = self.norm = None
        if reduction > 1:
            self.sr = nn.Conv2d(dim, dim, reduction, reduction)
            self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        """Attend to the reduced map, with rotary places: (B, H, W, C) -> (B, H, W, C)."""
        height, width = x.shape[1:3]
        reduced = x
        if self.sr is not None and self.norm is not None:
            reduced = self.norm(convolve(self.sr, x))
        rows, columns = reduced.shape[1:3]
        query = self.q(x).flatten(1, 2).unflatten(-1, (-1, HEAD_DIM))
        key, value = self.kv(reduced).flatten(1, 2).unflatten(-1, (-1, HEAD_DIM)).chunk(2, dim=2)
        unit = height / SCALED_SIDE if self.auto_scale else 1.0
        query = rotate(query, Lattice(height * width, width, unit=unit))
        s, row = self.reduction, width if self.key_places == "released" else columns
        key = rotate(key, Lattice(rows * columns, row, s, 1 - 1 / s, unit))
        return self.proj(attend(query, key, value).unflatten(1, (height, width)))


class BiasFreeSwiGLU(nn.Module):
    """W3 (SiLU(W1 x) * W2 x) under the authors' names; the hidden width is 8 C / 3, rounded up.

    Args:
        dim: Channels C.
        hidden_multiple: The hidden width is a multiple of it.

    Shape: (..., C) -> (..., C).
    """

    value_layer = "c_proj"
    channel_mappings = ("c_fc1", "c_fc2")

    def __init__(self, dim: int, hidden_multiple: int) -> None:
        super().__init__()
        hidden = ceil_div(8 * dim // 3, hidden_multiple) * hidden_multiple
        self.c_fc1 = nn.Linear(dim, hidden, bias=False)
        self.c_fc2 = nn.Linear(dim, hidden, bias=False)
        self.c_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """W3 (SiLU(W1 x) * W2 x): (..., C) -> (..., C)."""
        return self.c_proj(F.silu(self.c_fc1(x)) * self.c_fc2(x))


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend from queries (B, N, h, d) to keys and values (B, K, h, d): -> (B, N, h d)."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


def convolve(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """Embed patches of a map: (B, H, W, D) -> (B, ceil(H / side), ceil(W / side), C)."""
    x = padded(x, conv.stride[0])
    return to_nhwc(conv(to_nchw(x).contiguous(memory_format=torch.channels_last)))


def padded(x: Tensor, side: int) -> Tensor:
    """Pad (B, H, W, C) with zeros at its end to multiples of ``side``."""
    return F.pad(x, (0, 0, 0, missing(x.shape[2], side), 0, missing(x.shape[1], side)))


@register_host(
    "visionllama_s", source="VisionLLaMA (ECCV 2024), Pyramid-VisionLLaMA-S", plain_ffn=False
)
class VisionLLaMASmall(VisionLLaMA):
    """Widths 64 to 512, depths 2, 2, 10, 4."""

    widths, depths = (64, 128, 256, 512), (2, 2, 10, 4)


@register_host(
    "visionllama_b", source="VisionLLaMA (ECCV 2024), Pyramid-VisionLLaMA-B", plain_ffn=False
)
class VisionLLaMABase(VisionLLaMA):
    """Widths 96 to 768, depths 2, 2, 18, 2."""

    widths, depths = (96, 192, 384, 768), (2, 2, 18, 2)


@register_host(
    "visionllama_l", source="VisionLLaMA (ECCV 2024), Pyramid-VisionLLaMA-L", plain_ffn=False
)
class VisionLLaMALarge(VisionLLaMA):
    """Widths 128 to 1024, depths 2, 2, 18, 2."""

    widths, depths = (128, 256, 512, 1024), (2, 2, 18, 2)
