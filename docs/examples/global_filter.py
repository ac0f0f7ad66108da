"""A token mixer with a parameter that follows the map size: a filter of the half spectrum."""

import torch
from torch import Tensor, nn

from backbones import create_backbone
from backbones.base import Mixer
from backbones.registry import register_mixer


@register_mixer("spectrum_filter", kind="token", source="an example")
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


# In place of DeiT's attention, at the size that it was built for and at another one.
backbone = create_backbone("deit_t", token_mixer="spectrum_filter", img_size=64)
assert backbone(torch.zeros(1, 3, 64, 64))[0].shape == (1, 192, 4, 4)
assert backbone(torch.zeros(1, 3, 96, 64))[0].shape == (1, 192, 6, 4)
