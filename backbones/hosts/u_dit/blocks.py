"""Parts of U-DiT and U-FFNet: attention over four downsampled maps, its FFN, FFNified attention.

Source: Tian et al., "U-DiTs: Downsample Tokens in U-Shaped Diffusion Transformers", NeurIPS 2024,
https://arxiv.org/abs/2405.02730, and the authors' code (github.com/YuchuanTian/U-DiT).

Axes: B inputs, D channels, H W map.
"""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.nn.functional as F
from timm.layers import DropPath
from torch import Tensor, nn

from backbones.hosts.scaffolds.denoising import modulation, zero
from backbones.layers.reparam import Fusible
from backbones.layers.rotary import Lattice, rotate
from backbones.mixer_calls import mix_nchw
from backbones.slots import HostConfig, Slot, fill

EPS = 1e-6
FACTOR = 2  # by which both sides of a map shrink for attention
KERNEL = 5
MOST_LOGIT = 4.6052  # log(100)
RATIO = 2.0


class DownsampledAttention(nn.Module):
    """Cosine attention within each of the four maps of every second row and column.

    The maps are those of x + DW(x) with a depthwise 5x5 convolution DW. They share queries, keys
    and values, whose positions are rotary in two dimensions.

    Shape: (B, D, H, W) -> (B, D, H, W), with even H and W.
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.dwconv = nn.Conv2d(dim, dim, KERNEL, padding=KERNEL // 2, groups=dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Conv2d(dim, dim, 1)
        self.logit_scale = nn.Parameter(torch.full((heads, 1, 1), math.log(10)))

    def forward(self, x: Tensor) -> Tensor:
        """Attend within each map: (B, D, H, W) -> (B, D, H, W)."""
        height, width = (side // FACTOR for side in x.shape[2:])
        x = self.dwconv(x) + x
        # (B, D, h, 2, w, 2) -> (B * 4, h * w, D)
        maps = x.unflatten(3, (width, FACTOR)).unflatten(2, (height, FACTOR))
        tokens = maps.permute(0, 3, 5, 2, 4, 1).flatten(3, 4).flatten(0, 2)
        qkv = self.qkv(tokens).unflatten(2, (3, self.heads, -1)).unbind(2)  # (B * 4, N, h, d)
        lattice = Lattice(height * width, width)
        q, k = (F.normalize(rotate(tensor, lattice), dim=-1).transpose(1, 2) for tensor in qkv[:2])
        scale = self.logit_scale.clamp(max=MOST_LOGIT).exp()
        y = F.scaled_dot_product_attention(q * scale, k, qkv[2].transpose(1, 2), scale=1.0)
        y = y.transpose(1, 2).flatten(2)  # (B * 4, N, D)
        y = y.unflatten(0, (-1, FACTOR, FACTOR)).unflatten(3, (height, width))
        return self.proj(y.permute(0, 5, 3, 1, 4, 2).flatten(4, 5).flatten(2, 3))


class TwoPointwise(Fusible):
    """Two 1x1 convolutions without activation between them; folded they are one."""

    def __init__(self, dim: int, inner: int, out: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(dim, inner, 1), nn.Conv2d(inner, out, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Project twice: (B, D, H, W) -> (B, O, H, W)."""
        return self.second(self.first(x))

    @torch.no_grad()
    def fuse(self) -> nn.Conv2d:
        """Return one 1x1 convolution with W = W2 W1 and b = W2 b1 + b2."""
        first, second = self.first, self.second
        fused = nn.Conv2d(
            first.in_channels, second.out_channels, 1, device=first.weight.device,
            dtype=first.weight.dtype,
        )  # fmt: skip
        outer = second.weight.flatten(1)
        fused.weight.copy_((outer @ first.weight.flatten(1))[:, :, None, None])
        fused.bias.copy_(outer @ first.bias + second.bias)  # type: ignore[union-attr,operator]
        return fused


class DepthwiseSum(Fusible):
    """x plus depthwise convolutions of 5x5, 3x3 and 1x1; folded they are one of 5x5."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(dim, dim, side, padding=side // 2, groups=dim) for side in (KERNEL, 3, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum: (B, D, H, W) -> (B, D, H, W)."""
        total = x
        for conv in self.convs:
            total = total + conv(x)
        return total

    @torch.no_grad()
    def fuse(self) -> nn.Conv2d:
        """Return the 5x5 convolution with all kernels and the identity in it."""
        first = cast("nn.Conv2d", self.convs[0])
        dim = first.in_channels
        fused = nn.Conv2d(
            dim, dim, KERNEL, padding=KERNEL // 2, groups=dim, device=first.weight.device,
            dtype=first.weight.dtype,
        )  # fmt: skip
        weight, bias = torch.zeros_like(first.weight), torch.zeros_like(fused.bias)  # type: ignore[arg-type]
        for branch in self.convs:
            conv = cast("nn.Conv2d", branch)
            margin = (KERNEL - conv.kernel_size[0]) // 2
            weight += F.pad(conv.weight, (margin,) * 4)
            bias += conv.bias  # type: ignore[arg-type]
        weight[:, :, KERNEL // 2, KERNEL // 2] += 1
        fused.weight.copy_(weight)
        fused.bias.copy_(bias)  # type: ignore[union-attr]
        return fused


class DepthwiseFFN(nn.Module):
    """W2 DW(GELU(W1 x)), with branches in training: (B, D, H, W) -> (B, D, H, W)."""

    def __init__(self, dim: int, ratio: float) -> None:
        super().__init__()
        hidden = int(dim * ratio)
        self.project_in = TwoPointwise(dim, hidden // 2, hidden)
        self.dwconv = DepthwiseSum(hidden)
        self.project_out = TwoPointwise(hidden, hidden // 2, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Mix channels: (B, D, H, W) -> (B, D, H, W)."""
        return self.project_out(self.dwconv(F.gelu(self.project_in(x))))


class FFNifiedAttention(nn.Module):
    """V(GELU(K(W x))) with depthwise K and V, in the place of attention.

    FFNet's paper names neither kernel nor projections for U-FFNet, and its code is not published.

    Args:
        dim: D.
        kernel_size: Side of K and V, odd.
        projections: 1x1 convolutions: 1 is W alone, 2 adds one behind V, 3 another before V.
        batch_norm: True for a BatchNorm behind W.

    Shape: (B, D, H, W) -> (B, D, H, W).
    """

    def __init__(self, dim: int, kernel_size: int, projections: int, batch_norm: bool) -> None:
        super().__init__()
        self.query = nn.Conv2d(dim, dim, 1)
        self.norm = nn.BatchNorm2d(dim) if batch_norm else nn.Identity()
        self.key, self.value = (
            nn.Conv2d(dim, dim, kernel_size, padding=kernel_size // 2, groups=dim) for _ in range(2)
        )
        self.inner = nn.Conv2d(dim, dim, 1) if projections > 2 else nn.Identity()
        self.proj = nn.Conv2d(dim, dim, 1) if projections > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Mix tokens: (B, D, H, W) -> (B, D, H, W)."""
        y = F.gelu(self.key(self.norm(self.query(x))))
        return self.proj(self.value(self.inner(y)))


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of (B, D, H, W), without weights."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, eps=EPS, elementwise_affine=False)

    def forward(self, x: Tensor) -> Tensor:
        """Norm each token: (B, D, H, W) -> (B, D, H, W)."""
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Return (1 + scale) x + shift per channel: (B, D, H, W), (B, D), (B, D)."""
    return x * (1 + scale[:, :, None, None]) + shift[:, :, None, None]


class UDiTBlock(nn.Module):
    """Token and channel mixer, each between modulated norm and gate; half of U-DiT's block.

    Shape: (B, D, H, W) and a condition (B, D) -> (B, D, H, W).
    """

    def __init__(self, dim: int, attn: nn.Module, ratio: float, drop_path: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = ChannelNorm(dim), ChannelNorm(dim)
        self.attn = attn
        self.mlp: nn.Module = DepthwiseFFN(dim, ratio)
        self.adaLN_modulation = modulation(dim, 6)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def finish(self, slot: Slot, config: HostConfig) -> None:
        """Start as the identity, and fill the slots."""
        zero(self.adaLN_modulation[1])
        fill(self, "mlp", config.channel_mixer, slot)
        fill(self, "attn", config.token_mixer, slot)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Apply both mixers: (B, D, H, W) -> (B, D, H, W)."""
        parts = self.adaLN_modulation(condition).chunk(6, dim=1)
        shift1, scale1, gate1, shift2, scale2, gate2 = parts
        y = mix_nchw(self.attn, modulate(self.norm1(x), shift1, scale1))
        x = x + self.drop_path(gate1[:, :, None, None] * y)
        y = mix_nchw(self.mlp, modulate(self.norm2(x), shift2, scale2))
        return x + self.drop_path(gate2[:, :, None, None] * y)


class UDiTFinalLayer(nn.Module):
    """Modulated norm and 3x3 convolution: (B, D, H, W) -> (B, O, H, W)."""

    def __init__(self, dim: int, out: int) -> None:
        super().__init__()
        self.norm_final = ChannelNorm(dim)
        self.out_proj = nn.Conv2d(dim, out, 3, padding=1)
        self.adaLN_modulation = modulation(dim, 2)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Return the prediction: (B, D, H, W) -> (B, O, H, W)."""
        shift, scale = self.adaLN_modulation(condition).chunk(2, dim=1)
        return self.out_proj(modulate(self.norm_final(x), shift, scale))


class PixelDown(nn.Module):
    """3x3 convolution to half the channels, then 2x2 pixels as channels: D -> 2 D, half size."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(dim, dim // 2, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Halve the sides: (B, D, H, W) -> (B, 2 D, H / 2, W / 2)."""
        return F.pixel_unshuffle(self.conv(x), 2)


class PixelUp(nn.Module):
    """3x3 convolution to twice the channels, channels as 2x2 pixels, skip, 1x1 convolution."""

    def __init__(self, dim: int, skip_dim: int, out_dim: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(dim, 2 * dim, 3, padding=1, bias=False)
        self.reduce = nn.Conv2d(dim // 2 + skip_dim, out_dim, 1)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        """Double the sides and add the skip: (B, D, H, W), (B, S, 2 H, 2 W) -> (B, O, 2 H, 2 W)."""
        return self.reduce(torch.cat([F.pixel_shuffle(self.conv(x), 2), skip], dim=1))
