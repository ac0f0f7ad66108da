"""Average pooling as a token mixer, the simplest there is.

Source: Yu et al., "MetaFormer Is Actually What You Need for Vision", CVPR 2022,
https://arxiv.org/abs/2111.11418, Eq. 4.
"""

from __future__ import annotations

from torch import Tensor

from backbones.layers.axes import to_nchw, to_nhwc
from backbones.layers.pooling import NeighbourMean
from backbones.layers.reparam import as_kernel
from backbones.mixer import Mixer
from backbones.registry import register_mixer


@register_mixer("pooling", kind="token", source="PoolFormer (CVPR 2022), Eq. 4")
class Pooling(Mixer):
    """The mean of the neighbours inside the map, minus the token itself.

    Args:
        dim: Channels C.
        kernel_size: Side of the neighbourhood, odd.

    Shape: (B, H, W, C) -> (B, H, W, C). Parameters: 0.

    Raises:
        ValueError: An even kernel.

    Source: PoolFormer (CVPR 2022), Eq. 4, https://arxiv.org/abs/2111.11418.
    """

    def __init__(self, dim: int, *, kernel_size: int = 3) -> None:
        super().__init__()
        side = as_kernel(kernel_size)[0]
        self.pool = NeighbourMean(side)

    def mix(self, x: Tensor) -> Tensor:
        """Return the mean of the neighbours, less x: (B, H, W, C) -> (B, H, W, C)."""
        return to_nhwc(self.pool(to_nchw(x))) - x
