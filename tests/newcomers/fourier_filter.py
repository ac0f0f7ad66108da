"""A filter of the whole map's spectrum, with one complex weight per frequency and channel.

Source: Rao et al., "Global Filter Networks for Image Classification", NeurIPS 2021,
https://arxiv.org/abs/2107.00645, Eq. 6.
"""

import torch
from torch import Tensor, nn

from backbones.base import Mixer
from backbones.registry import register_mixer


@register_mixer("fourier_filter", kind="channel", source="GFNet (NeurIPS 2021), Eq. 6")
class FourierFilter(Mixer):
    """irfft2(K * rfft2(x)), where K belongs to the map's size.

    Shape: (B, H, W, C) -> (B, H, W, C). Parameters: 2 H (W // 2 + 1) C.
    """

    def __init__(self, dim: int, *, grid: tuple[int, int] = (14, 14)) -> None:
        super().__init__()
        self.grid_axes = {"filter": "H F C 2"}
        self.filter = nn.Parameter(0.02 * torch.randn(grid[0], grid[1] // 2 + 1, dim, 2))

    def mix(self, x: Tensor) -> Tensor:
        size = (x.shape[1], x.shape[2])
        precise = torch.promote_types(x.dtype, torch.float32)  # FFTs have no half precision
        weights = torch.view_as_complex(self.at_size("filter", size).to(precise))
        spectrum = torch.fft.rfft2(x.to(precise), dim=(1, 2), norm="ortho")
        return torch.fft.irfft2(spectrum * weights, s=size, dim=(1, 2), norm="ortho").to(x.dtype)

    def mix_prefix(self, prefix: Tensor) -> Tensor:
        return prefix
