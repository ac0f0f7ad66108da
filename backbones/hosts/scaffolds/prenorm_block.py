"""Block of most hosts: two residual branches, each after its norm, with slots for mixers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from timm.layers import DropPath
from torch import Tensor, nn

from backbones.mixer_calls import mix_nchw
from backbones.slots import HostConfig, Slot, fill


class PreNormBlock(nn.Module):
    """x + DropPath(g1 attn(norm1(x))), then x + DropPath(g2 mlp(norm2(x))).

    Args:
        dim: Channels C.
        norm: Builds both norms.
        attn: The token mixer.
        mlp: The channel mixer.
        drop_path: Stochastic depth of both branches.
        layer_scale: Initial value of g1 and g2, one per channel; None leaves them out. Only
            for (B, H, W, C).
        channels_first: Work on (B, C, H, W) instead of (B, H, W, C).

    Shape: (B, H, W, C) -> (B, H, W, C).
    """

    def __init__(
        self,
        dim: int,
        norm: Callable[[int], nn.Module],
        attn: nn.Module,
        mlp: nn.Module,
        *,
        drop_path: float = 0.0,
        layer_scale: float | None = None,
        channels_first: bool = False,
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(dim), norm(dim)
        self.attn, self.mlp = attn, mlp
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()
        self.gamma_1 = self.gamma_2 = None
        if layer_scale is not None:
            self.gamma_1 = nn.Parameter(torch.full((dim,), layer_scale))
            self.gamma_2 = nn.Parameter(torch.full((dim,), layer_scale))
        self.channels_first = channels_first

    def fill_slots(self, slot: Slot, config: HostConfig) -> None:
        """Replace the block's mixers by those of a configuration."""
        fill(self, "mlp", config.channel_mixer, slot)
        fill(self, "attn", config.token_mixer, slot)

    def forward(self, x: Tensor) -> Tensor:
        """Apply token and channel mixer, each with its shortcut: (B, H, W, C) -> the same."""
        x = x + self.drop_path(self._branch(self.attn, self.norm1(x), self.gamma_1))
        return x + self.drop_path(self._branch(self.mlp, self.norm2(x), self.gamma_2))

    def _branch(self, mixer: nn.Module, x: Tensor, gamma: Tensor | None) -> Tensor:
        y = mix_nchw(mixer, x) if self.channels_first else mixer(x)
        return y if gamma is None else y * gamma
