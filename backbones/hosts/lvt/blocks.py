"""Blocks and stages of LVT; see ``backbones.hosts.lvt``.

Source: Yang et al., "Lite Vision Transformer with Enhanced Self-Attention", CVPR 2022,
https://arxiv.org/abs/2112.10809.

Axes: B images, H W map, C channels, N tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from timm.layers import DropPath
from torch import Tensor, nn

from backbones.hosts.lvt.attention import ClassAttention
from backbones.layers.patch_embed import PatchEmbed
from backbones.mixer import Mixer
from backbones.mixers.attentions.csa import ConvolutionalSelfAttention
from backbones.mixers.attentions.rasa import RecursiveAtrousSelfAttention
from backbones.mixers.conv_ffn import ConvFFN
from backbones.mixers.ffn import FFN
from backbones.slots import MixerFactory, Slot, fill

CLASS_RATIO = 4  # hidden width of the class blocks' FFNs over C


@dataclass(frozen=True)
class LVTStageSpec:
    """Configuration of a stage.

    Attributes:
        dim: C.
        kernel_size: Side of the embedding's convolution.
        stride: Stride of the embedding's convolution.
        ratio: Hidden width of the FFNs over C.
        reduction: Reduction of the keys of RASA; None for CSA and a plain FFN.
    """

    dim: int
    kernel_size: int
    stride: int
    ratio: int
    reduction: int | None


SPECS = (
    LVTStageSpec(64, 7, 4, ratio=4, reduction=None),
    LVTStageSpec(64, 3, 2, ratio=8, reduction=4),
    LVTStageSpec(160, 3, 2, ratio=4, reduction=2),
    LVTStageSpec(256, 3, 2, ratio=4, reduction=1),
)


class LVTStage(nn.Module):
    """Patch embedding and blocks: (B, D, H, W) -> (B, h, w, C)."""

    def __init__(
        self, in_channels: int, spec: LVTStageSpec, steps: int, drop_paths: Sequence[float]
    ) -> None:
        super().__init__()
        self.embed = PatchEmbed(in_channels, spec.dim, spec.kernel_size, spec.stride)
        self.blocks = nn.Sequential(*(LVTBlock(spec, steps, rate) for rate in drop_paths))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the blocks to the embedded patches: (B, D, H, W) -> (B, h, w, C)."""
        return self.blocks(self.embed(x))


class LVTBlock(nn.Module):
    """x + attn(LN x), then x + mlp(LN x); with RASA the FFN has a depthwise convolution.

    Shape: (B, H, W, C) -> (B, H, W, C).
    """

    def __init__(self, spec: LVTStageSpec, steps: int, drop_path: float) -> None:
        super().__init__()
        dim = spec.dim
        self.attn: Mixer
        self.mlp: Mixer
        if spec.reduction is None:
            self.attn = ConvolutionalSelfAttention(dim)
            self.mlp = FFN(dim, hidden_ratio=spec.ratio)
        else:
            self.attn = RecursiveAtrousSelfAttention(dim, spec.reduction, steps)
            self.mlp = ConvFFN(dim, spec.ratio * dim, kernel_size=3)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Apply attention and FFN, each with its shortcut: (B, H, W, C) -> the same."""
        x = x + self.drop_path(self.attn(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class ClassBlock(nn.Module):
    """Attention of the class token to all tokens; only the class token is updated.

    Shape: (B, 1, C) and (B, N, C) -> (B, 1, C).
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = ClassAttention(dim)
        self.mlp: Mixer = FFN(dim, hidden_ratio=CLASS_RATIO)

    def forward(self, token: Tensor, tokens: Tensor) -> Tensor:
        """Update the class token by attention and FFN: (B, 1, C) and (B, N, C) -> (B, 1, C)."""
        token = token + self.attn(self.norm1(torch.cat([token, tokens], dim=1)))
        # For a mixer the class token is a map of a single position.
        return token + self.mlp(self.norm2(token)[:, None])[:, 0]

    def fill_slot(self, factory: MixerFactory | None, index: int) -> None:
        """Replace the FFN by a mixer.

        Args:
            factory: Builds the mixer; None keeps the FFN.
            index: Index of this class block.
        """
        dim = self.norm1.normalized_shape[0]
        slot = Slot(dim, CLASS_RATIO, (1, 1), len(SPECS), index, dense=False)
        fill(self, "mlp", factory, slot)
