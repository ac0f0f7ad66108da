"""Decoder of FFNet_seg: three maps resized to stride 8, squeezed, then FFNified attention blocks.

    x <- GELU(x + drop_path(V(GELU(K(BN(W x))))));  x <- GELU(x + drop_path(W2 GELU(W1 D(x))))

Unlike in the backbone, a GELU follows each sum and LayerScale is absent. K, V and D are 9x9; they
train with parallel strips and a 5x5 kernel, which ``fuse`` merges.

Source: Yun et al., "FFNet: MetaMixer-based Efficient Convolutional Mixer Design",
https://arxiv.org/abs/2406.02021, App. F.1; widths, order and drop path by block from the authors'
code (github.com/ysj9909/FFNet), which gave the published figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import DropPath
from torch import Tensor, nn

from backbones.layers.bounds import check_range
from backbones.layers.init import init_all
from backbones.layers.reparam import NO_WAY_BACK, ConvBN, depthwise, fuse, is_fused
from backbones.mixer_calls import mix_nchw
from backbones.mixers.metamixer.ffnified import branch_kernels
from backbones.mixers.metamixer.instances import convnext_block, convolutional

KERNEL = 9


class FFNetSegDecoder(nn.Module):
    """Decoder from maps at strides 8, 16 and 32 to one map at stride 8.

    Args:
        in_channels: Widths of the maps, fine to coarse.
        out_channels: Width of the output; the published decoder has 1024.
        width: Channels of the blocks.
        depth: Number of blocks; 3 for ADE20K, 5 for Cityscapes.
        expansion: Hidden width of W1 over ``width``; 4 for ADE20K, 1 for Cityscapes.
        drop_path_rate: Rate of the last block, rising to it from 0; 0.1 for ADE20K, 0 for
            Cityscapes.
        fused: Build the plain form for inference, without branches and BatchNorm.

    Shape: maps (B, C_i, h_i, w_i) -> (B, out_channels, h_0, w_0).
    """

    def __init__(
        self,
        in_channels: Sequence[int],
        out_channels: int = 1024,
        *,
        width: int = 256,
        depth: int = 3,
        expansion: int = 4,
        drop_path_rate: float = 0.1,
        fused: bool = False,
    ) -> None:
        super().__init__()
        check_range("depth of the decoder", depth, 1)
        check_range("expansion of the decoder", expansion, 1)
        self.options: dict[str, Any] = {
            "in_channels": tuple(in_channels), "out_channels": out_channels, "width": width,
            "depth": depth, "expansion": expansion,
        }  # fmt: skip
        total = sum(in_channels)
        self.squeeze = nn.Sequential(ConvBN(total, total), nn.GELU(), ConvBN(total, width))
        rates = torch.linspace(0, drop_path_rate, depth, device="cpu").tolist()
        self.blocks = nn.Sequential(*(DecoderBlock(width, expansion, rate) for rate in rates))
        self.align = nn.Sequential(ConvBN(width, out_channels), nn.GELU())
        init_all(self)
        if fused:
            fuse(self)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Resize all maps to the finest, concatenate them and run the blocks."""
        finest, *coarser = maps
        size = finest.shape[-2:]
        coarser = [F.interpolate(x, size, mode="bicubic", align_corners=False) for x in coarser]
        x = torch.cat([finest, *coarser], dim=1)
        return self.align(self.blocks(self.squeeze(x)))

    def fold_state_dict(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Fold weights of the training form for a fused decoder; other weights stay as they are.

        Raises:
            ValueError: The weights are fused but the decoder is not, which is irreversible.
        """
        if "squeeze.0.weight" in state_dict and not is_fused(self):
            option = "head.model.decode_head.fused=true"
            raise ValueError(NO_WAY_BACK.format(part="head", option=option))
        if "squeeze.0.conv.weight" not in state_dict or not is_fused(self):
            return state_dict
        twin = FFNetSegDecoder(**self.options).to(state_dict["squeeze.0.conv.weight"].dtype)
        twin.load_state_dict(state_dict)
        return fuse(twin).state_dict()


class DecoderBlock(nn.Module):
    """FFNified attention, then a ConvNeXt block, with a GELU after each shortcut.

    Shape: (B, C, H, W) -> (B, C, H, W).
    """

    def __init__(self, dim: int, expansion: int, drop_path: float) -> None:
        super().__init__()
        branches = branch_kernels(KERNEL, "strips")
        key, value, query = (depthwise(dim, KERNEL, branches) for _ in range(3))
        self.token_mixer = convolutional(ConvBN(dim, dim), key, value)
        self.channel_mixer = convnext_block(query, dim, expansion * dim)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Apply the token mixer, then the channel mixer: (B, C, H, W) -> (B, C, H, W)."""
        x = F.gelu(x + self.drop_path(mix_nchw(self.token_mixer, x)))
        return F.gelu(x + self.drop_path(mix_nchw(self.channel_mixer, x)))
