from torch import Tensor, nn

from backbones.base import Mixer
from backbones.layers.axes import to_nchw, to_nhwc
from backbones.options import check_odd
from backbones.registry import register_mixer


@register_mixer("row_column", kind="token", source="an example")
class RowColumn(Mixer):
    """W (D_row x + D_column x), depthwise convolutions along rows and columns.

    Args:
        dim: Channels C.
        kernel_size: Tokens that each convolution sees, odd.
    """

    def __init__(self, dim: int, *, kernel_size: int = 7) -> None:
        super().__init__()
        check_odd(kernel_size)
        reach = kernel_size // 2
        self.row = nn.Conv2d(dim, dim, (1, kernel_size), padding=(0, reach), groups=dim)
        self.column = nn.Conv2d(dim, dim, (kernel_size, 1), padding=(reach, 0), groups=dim)
        self.proj = nn.Linear(dim, dim)

    def mix(self, x: Tensor) -> Tensor:
        """(B, H, W, C) -> (B, H, W, C)."""
        maps = to_nchw(x)
        return self.proj(to_nhwc(self.row(maps) + self.column(maps)))
