"""MLP-Mixer's token mixing: one MLP over all tokens, the same for every channel.

    y = W2 GELU(W1 x + b1) + b2,  x as a matrix of N tokens and C channels

Source: Tolstikhin et al., "MLP-Mixer: An all-MLP Architecture for Vision", NeurIPS 2021,
https://arxiv.org/abs/2105.01601, Eq. 1. The hidden width of half the channels is that of Table 1;
weights start as in the authors' code, normal of variance 1 / fan-in and truncated, biases at zero.

Axes: N = H W tokens in row-major order, D hidden tokens.
"""

from __future__ import annotations

from types import MappingProxyType

import torch.nn.functional as F
from timm.layers import lecun_normal_
from torch import Tensor, nn

from backbones.layers.bounds import check_range
from backbones.mixer import Mixer
from backbones.registry import register_mixer


@register_mixer("spatial_mlp", kind="token", source="MLP-Mixer (NeurIPS 2021), Eq. 1")
class SpatialMLP(Mixer):
    """W2 GELU(W1 x + b1) + b2 over tokens; class tokens are not mixed: the host pools its map.

    W1, W2 and b2 belong to the map size that the host was built for and are interpolated for
    others; W1 keeps the size of its sums. They cost O(N C D).

    Args:
        dim: Channels C.
        grid: Map size (H, W).
        expansion: D over C.

    Shape: (B, H, W, C) -> (B, H, W, C). Parameters: 2 N D + D + N.

    Raises:
        ValueError: D is below 1.

    Source: MLP-Mixer (NeurIPS 2021), Eq. 1, https://arxiv.org/abs/2105.01601.
    """

    grid_axes = MappingProxyType({"fc1.weight": "D n", "fc2.weight": "N D", "fc2.bias": "N"})

    def __init__(self, dim: int, *, grid: tuple[int, int], expansion: float = 0.5) -> None:
        super().__init__()
        tokens, hidden = grid[0] * grid[1], int(expansion * dim)
        check_range("expansion * dim", hidden, 1)
        self.fc1, self.fc2 = nn.Linear(tokens, hidden), nn.Linear(hidden, tokens)
        for layer in (self.fc1, self.fc2):
            lecun_normal_(layer.weight)  # type: ignore[no-untyped-call]
            nn.init.zeros_(layer.bias)

    def mix(self, x: Tensor) -> Tensor:
        """Return W2 GELU(W1 x + b1) + b2 over tokens: (B, H, W, C) -> (B, H, W, C)."""
        size = (x.shape[1], x.shape[2])
        first, second, bias = (self.at_size(name, size) for name in self.grid_axes)
        hidden = F.gelu(F.linear(x.flatten(1, 2).mT, first, self.fc1.bias))
        return F.linear(hidden, second, bias).mT.unflatten(1, size)
