"""Global filter: the spectrum of every channel times a learnt filter of the size of the map.

    y = IFFT2(K * FFT2(x))

Source: Rao et al., "Global Filter Networks for Image Classification", NeurIPS 2021,
https://arxiv.org/abs/2107.00645. Transforms are orthonormal and K starts normal of 0.02, as
in the authors' code.

onnxruntime does not run its transforms; export it to torch_export.
"""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch import Tensor, nn

from backbones.layers.spectral import filter_matrix, filter_spectrum
from backbones.mixer import Mixer
from backbones.registry import register_mixer

MOST = 2**25  # numbers in the matrices of the analysis relations


@register_mixer("global_filter", kind="token", source="GFNet (NeurIPS 2021)")
class GlobalFilter(Mixer):
    """IFFT2(K * FFT2(x)) for each channel; class tokens are not mixed: the host pools its map.

    K belongs to the map size that the host was built for and is interpolated for others, as the
    authors do for fine-tuning. Half of the spectrum is stored, since the map is real.

    Args:
        dim: Channels C.
        grid: Map size (H, W).

    Shape: (B, H, W, C) -> (B, H, W, C). Parameters: 2 H (W // 2 + 1) C.

    Source: GFNet (NeurIPS 2021), https://arxiv.org/abs/2107.00645.
    """

    grid_axes = MappingProxyType({"filter": "H F C 2"})

    def __init__(self, dim: int, *, grid: tuple[int, int]) -> None:
        super().__init__()
        self.grid = grid
        self.filter = nn.Parameter(0.02 * torch.randn(grid[0], grid[1] // 2 + 1, dim, 2))

    def token_matrix(self) -> tuple[Tensor, tuple[int, int]]:
        """Return matrices (s, N, N) of channels at the map it was built for, and the map's size.

        Large maps show fewer channels, evenly spaced, so that ``MOST`` numbers hold them.
        """
        tokens, channels = self.grid[0] * self.grid[1], self.filter.shape[2]
        count = max(1, min(channels, MOST // tokens**2))
        sample = torch.linspace(0, channels - 1, count).round().long().to(self.filter.device)
        filters = self.at_size("filter", self.grid).index_select(2, sample)
        return filter_matrix(filters, self.grid), self.grid

    def mix(self, x: Tensor) -> Tensor:
        """Return IFFT2(K * FFT2(x)): (B, H, W, C) -> (B, H, W, C)."""
        return filter_spectrum(x, self.at_size("filter", (x.shape[1], x.shape[2])))
