"""Calls of mixers on a host's tokens and maps: the only place that converts their layout.

A host's own modules (timm's) keep the host's layout; a ``Mixer`` in their place gets its map.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from backbones.layers.axes import to_nchw, to_nhwc
from backbones.mixer import Mixer, PointwiseMixer


def mix_tokens(
    mixer: nn.Module, tokens: Tensor, grid: tuple[int, int], num_prefix_tokens: int
) -> Tensor:
    """Apply a mixer to tokens (B, P + H * W, C): prefix tokens, then the map in row-major order."""
    if not isinstance(mixer, Mixer):
        return mixer(tokens)
    if isinstance(mixer, PointwiseMixer) and mixer.prefix_mixing == "none":
        return mixer(tokens)
    prefix, patches = tokens[:, :num_prefix_tokens], tokens[:, num_prefix_tokens:]
    x = patches.unflatten(1, grid)
    if not num_prefix_tokens:
        return mixer(x).flatten(1, 2)
    x, prefix = mixer(x, prefix)
    return torch.cat([prefix, x.flatten(1, 2)], dim=1)


def mix_nchw(mixer: nn.Module, x: Tensor) -> Tensor:
    """Apply a mixer to a map (B, C, H, W); a map in channels_last memory is not copied."""
    if not isinstance(mixer, Mixer):
        return mixer(x)
    return to_nchw(mixer(to_nhwc(x)))


class NormedMixer(Mixer):
    """BatchNorm and a mixer, for a block without norm."""

    def __init__(self, dim: int, mixer: Mixer) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(dim)
        self.mixer = mixer

    def mix(self, x: Tensor) -> Tensor:
        """Return mixer(BN(x)): (B, H, W, C) -> (B, H, W, C)."""
        return self.mixer(to_nhwc(self.norm(to_nchw(x))))
