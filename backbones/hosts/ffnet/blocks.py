"""Parts of FFNet: variants, stem, downsampling, blocks; see ``backbones.hosts.ffnet``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from timm.layers import DropPath
from torch import Tensor, nn

from backbones.layers.reparam import BranchedConv, ConvBN, Kernel, SkipNormConv, depthwise
from backbones.mixer_calls import NormedMixer, mix_nchw
from backbones.mixers.metamixer.ffnified import branch_kernels
from backbones.mixers.metamixer.instances import convnext_block, convolutional
from backbones.slots import MixerFactory, Slot, factory_at, fill

STEM_WIDTH = 64


@dataclass(frozen=True)
class Variant:
    """Column of Table 9.

    Attributes:
        widths: Channels of the four stages.
        depths: Blocks of the four stages.
        token_kernels: Side of K and V by stage.
        channel_kernel: Side of D.
        expansion: Hidden width of W1 over C.
        layer_scale: Initial value of LayerScale; None leaves it out.
        seg: Use stem, downsampling, strips and pooling of FFNet_seg.
    """

    widths: Sequence[int]
    depths: Sequence[int]
    token_kernels: Sequence[int] = (3, 3, 7, 7)
    channel_kernel: int = 7
    expansion: int = 3
    layer_scale: float | None = None
    seg: bool = False

    def token_branches(self, stage: int, branches: bool = True) -> tuple[Kernel, ...] | None:
        """Return the additional kernels of K and V; None for plain convolutions with bias."""
        kernels = branch_kernels(self.token_kernels[stage], "strips" if self.seg else "small")
        return kernels if branches or kernels is None else ()

    def channel_branches(self, branches: bool = True) -> tuple[Kernel, ...]:
        """Return the additional kernels of D, which always has its BatchNorm."""
        return (branch_kernels(self.channel_kernel, "small") if branches else None) or ()


VARIANTS = {
    "ffnet_1": Variant((80, 160, 320, 640), (2, 2, 8, 2), channel_kernel=3),
    "ffnet_2": Variant((88, 176, 352, 704), (3, 3, 15, 3)),
    "ffnet_3": Variant((96, 192, 384, 768), (4, 4, 22, 5), layer_scale=1e-6),
    "ffnet_4": Variant((128, 256, 512, 1024), (4, 4, 27, 3), layer_scale=1e-6),
    "ffnet_seg": Variant(
        (96, 192, 384, 768), (3, 4, 18, 5), (3, 3, 9, 9), 3, expansion=4, layer_scale=1e-5, seg=True
    ),
}


class FFNetStage(nn.Module):
    """Downsampling by 2 in all stages after the first, then blocks.

    Args:
        variant: The network.
        stage: Index from 0.
        drop_paths: Stochastic depth of each block.
        branches: False leaves out the additional kernels.

    Shape: (B, D, H, W) -> (B, C, ceil(H / 2), ceil(W / 2)), or (B, C, H, W) in the first stage.
    """

    def __init__(
        self, variant: Variant, stage: int, drop_paths: Sequence[float], branches: bool
    ) -> None:
        super().__init__()
        self.downsample: nn.Module = nn.Identity()
        if stage:
            dim, out = variant.widths[stage - 1 : stage + 1]
            self.downsample = _downsampling(dim, out, variant.seg, branches)
        self.blocks = nn.Sequential(
            *(FFNetBlock(variant, stage, drop_path, branches) for drop_path in drop_paths)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Apply downsampling and blocks: (B, D, H, W) -> (B, C, h, w)."""
        return self.blocks(self.downsample(x))


class FFNetBlock(nn.Module):
    """x + drop_path(ls1 * token(x)), then x + drop_path(ls2 * channel(x)).

    Shape: (B, C, H, W) -> (B, C, H, W).
    """

    def __init__(self, variant: Variant, stage: int, drop_path: float, branches: bool) -> None:
        super().__init__()
        dim, side = variant.widths[stage], variant.token_kernels[stage]
        self.token_mixer: nn.Module = convolutional(
            ConvBN(dim, dim),
            *(depthwise(dim, side, variant.token_branches(stage, branches)) for _ in range(2)),
        )
        query = depthwise(dim, variant.channel_kernel, variant.channel_branches(branches))
        self.channel_mixer: nn.Module = convnext_block(query, dim, variant.expansion * dim)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()
        # (C, 1, 1) as in the authors' code: parameters of more than one axis take weight decay.
        self.token_scale = _layer_scale(dim, variant.layer_scale)
        self.channel_scale = _layer_scale(dim, variant.layer_scale)

    def forward(self, x: Tensor) -> Tensor:
        """Apply token and channel mixer, each with its shortcut: (B, C, H, W) -> the same."""
        y = mix_nchw(self.token_mixer, x)
        x = x + self.drop_path(y if self.token_scale is None else y * self.token_scale)
        y = mix_nchw(self.channel_mixer, x)
        return x + self.drop_path(y if self.channel_scale is None else y * self.channel_scale)

    def fill_slots(
        self, slot: Slot, channel_mixer: MixerFactory | None, token_mixer: MixerFactory | None
    ) -> None:
        """Replace W1 and W2 by a channel mixer after D, and FFNified attention by a token mixer."""
        if factory_at(channel_mixer, slot) is not None:
            self.channel_mixer = QueriedMixer(self.channel_mixer)
        fill(self.channel_mixer, "memory", channel_mixer, slot)
        make = factory_at(token_mixer, slot)
        if make is not None:
            fill(self, "token_mixer", lambda slot: NormedMixer(slot.dim, make(slot)), slot)


class QueriedMixer(nn.Module):
    """ConvNeXt block with its keys and values replaced by a mixer.

    Shape: (B, C, H, W) -> (B, C, H, W).
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.query = block.get_submodule("query")
        self.memory = block.get_submodule("memory")

    def forward(self, x: Tensor) -> Tensor:
        """Mix the output of the query convolution: (B, C, H, W) -> (B, C, H, W)."""
        return mix_nchw(self.memory, self.query(x))


class SegHead(nn.Module):
    """Last layers of FFNet_seg on ImageNet: 1x1 convolution, mean, linear layer, LayerNorm.

    Shape: (B, C, H, W) -> (B, 1280).
    """

    hidden, width = 1024, 1280

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv = ConvBN(dim, self.hidden)
        self.fc = nn.Linear(self.hidden, self.width)
        self.norm = nn.LayerNorm(self.width, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """Return the embedding of a map: (B, C, H, W) -> (B, 1280)."""
        x = F.hardswish(self.conv(x)).mean(dim=(2, 3))
        return F.hardswish(self.norm(self.fc(x)))


def stem(variant: Variant) -> nn.Sequential:
    """Build 3x3 convolutions (B, 3, H, W) -> (B, C, ceil(H / 4), ceil(W / 4))."""
    width = variant.widths[0]
    first = (ConvBN(3, STEM_WIDTH, 3, stride=2), nn.GELU())
    if not variant.seg:
        return nn.Sequential(*first, ConvBN(STEM_WIDTH, width, 3, stride=2))
    return nn.Sequential(
        *first,
        ConvBN(STEM_WIDTH, STEM_WIDTH, 3),
        nn.GELU(),
        ConvBN(STEM_WIDTH, width, 3),
        ConvBN(width, width, 3, stride=2),
    )


def _downsampling(dim: int, out: int, seg: bool, branches: bool) -> nn.Sequential:
    """Build a stage's downsampling (B, D, H, W) -> (B, O, ceil(H / 2), ceil(W / 2))."""
    if seg:
        return nn.Sequential(ConvBN(dim, 2 * out, 3, stride=2), nn.GELU(), ConvBN(2 * out, out))
    kernels = [(7, 7), (3, 3)] if branches else [(7, 7)]
    return nn.Sequential(BranchedConv(dim, out, kernels, stride=2), SkipNormConv(out))


def _layer_scale(dim: int, value: float | None) -> nn.Parameter | None:
    return None if value is None else nn.Parameter(torch.full((dim, 1, 1), value))
