"""Sparse MLP: linear layers over the rows and columns of a map, after a depthwise convolution.

    z = D GELU(BN(x)),  u = GELU(BN(z))
    y = W [u, R u, S u]

D is a depthwise 3x3 convolution, R a linear layer over the H tokens of each column, S one over the
W tokens of each row, both shared by all channels. W fuses the three maps.

Source: Tang et al., "Sparse MLP for Image Recognition: Is Self-Attention Really Necessary?", AAAI
2022, https://arxiv.org/abs/2109.05422; batch norms and GELU before each layer as
in the authors' code, which keeps torch's initialisation.

Axes: B images, H W map, C channels.
"""

from __future__ import annotations

from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.axes import to_nchw, to_nhwc
from backbones.layers.norms import normalise
from backbones.mixer import Mixer
from backbones.registry import register_mixer


@register_mixer("s_mlp", kind="token", source="sMLPNet (AAAI 2022)")
class SparseMLP(Mixer):
    """W [u, R u, S u] with u = GELU(BN(D GELU(BN(x)))); class tokens are not mixed.

    The host pools its map. R and S belong to the map size that the host was built for and are
    interpolated for others, where they keep the size of their sums.

    Args:
        dim: Channels C.
        grid: Map size (H, W).

    Shape: (B, H, W, C) -> (B, H, W, C). Parameters: 3 C^2 + 13 C + H^2 + H + W^2 + W.

    Source: sMLPNet (AAAI 2022), https://arxiv.org/abs/2109.05422.
    """

    grid_axes = MappingProxyType(
        {"proj_h.weight": "H h", "proj_h.bias": "H", "proj_w.weight": "W w", "proj_w.bias": "W"}
    )

    def __init__(self, dim: int, *, grid: tuple[int, int]) -> None:
        super().__init__()
        self.grid = grid
        self.norm1, self.norm2 = nn.BatchNorm1d(dim), nn.BatchNorm1d(dim)
        self.dwconv = nn.Conv2d(dim, dim, 3, padding=1, groups=dim, bias=False)
        self.proj_h, self.proj_w = (nn.Linear(side, side) for side in grid)
        self.fuse = nn.Linear(3 * dim, dim, bias=False)

    def token_matrix(self) -> tuple[Tensor, tuple[int, int]]:
        """Return R and S as matrices over tokens (2, N, N), and the map's size.

        They map u, at the size of the map that they were built for.
        """
        down, across = (self.at_size(f"{name}.weight", self.grid) for name in ("proj_h", "proj_w"))
        rows, columns = (torch.eye(side).to(down) for side in self.grid)
        return torch.stack([torch.kron(down, columns), torch.kron(rows, across)]), self.grid

    def mix(self, x: Tensor) -> Tensor:
        """Convolve, map columns and rows, and fuse: (B, H, W, C) -> (B, H, W, C)."""
        size = (x.shape[1], x.shape[2])
        x = to_nhwc(self.dwconv(to_nchw(F.gelu(normalise(x, self.norm1)))))
        x = F.gelu(normalise(x, self.norm2))
        of_columns, of_rows = (
            [self.at_size(f"{name}.{part}", size) for part in ("weight", "bias")]
            for name in ("proj_h", "proj_w")
        )
        down = F.linear(x.transpose(1, 3), *of_columns).transpose(1, 3)
        across = F.linear(x.transpose(2, 3), *of_rows).transpose(2, 3)
        return self.fuse(torch.cat([x, down, across], dim=-1))
