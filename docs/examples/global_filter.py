"""A parameter that follows the map size: a global filter of the half spectrum."""

import torch
from torch import Tensor, nn

from backbones.base import Mixer


class GlobalFilter(Mixer):
    """Multiply the spectrum of the map by learned weights."""

    def __init__(self, dim: int, *, grid: tuple[int, int] = (14, 14)) -> None:
        super().__init__()
        self.grid_axes = {"filter": "H F C 2"}
        self.filter = nn.Parameter(0.02 * torch.randn(grid[0], grid[1] // 2 + 1, dim, 2))

    def mix(self, x: Tensor) -> Tensor:
        """(B, H, W, C) -> (B, H, W, C)."""
        size = (x.shape[1], x.shape[2])
        weights = torch.view_as_complex(self.at_size("filter", size))
        spectrum = torch.fft.rfft2(x, dim=(1, 2), norm="ortho")
        return torch.fft.irfft2(spectrum * weights, s=size, dim=(1, 2), norm="ortho")


mixer = GlobalFilter(8)
mixer.built_for = (14, 14)  # set by create_backbone
assert mixer(torch.zeros(1, 7, 9, 8)).shape == (1, 7, 9, 8)
