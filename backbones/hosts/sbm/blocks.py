"""Parts of the SBM network: stem, blocks and downsampling.

Stem and downsampling are those of MLLA (Han et al., "Demystify Mamba in Vision", NeurIPS 2024).
Their cost fits the tables of SBM (Peng et al., CVPR 2025), which leaves them open.

Axes: B images, (h, w) map, d channels.
"""

from __future__ import annotations

from timm.layers import DropPath
from torch import Tensor, nn

from backbones.layers.conv_pos_enc import ConvPosEnc
from backbones.layers.pointwise import PointwiseConv2d
from backbones.mixer import Mixer
from backbones.mixers.ffn import FFN
from backbones.mixers.sbm import StarBilinearMapping


class SBMBlock(nn.Module):
    """Two sublayers with shortcuts, each after LayerNorm and an optional positional encoding.

    Shape: (B, h, w, d) -> (B, h, w, d).

    Source: SBM (CVPR 2025), Sec. 4.1, Fig. 2b.
    """

    def __init__(
        self,
        mixer: StarBilinearMapping,
        mlp: FFN,
        drop_path: float,
        num_cpe: int,
        shortcut: bool,
        norm: bool,
    ) -> None:
        super().__init__()
        dim = mixer.dim
        self.cpe1 = ConvPosEnc(dim) if num_cpe > 0 else nn.Identity()
        self.cpe2 = ConvPosEnc(dim) if num_cpe > 1 else nn.Identity()
        self.norm1 = nn.LayerNorm(dim) if norm else nn.Identity()
        self.norm2 = nn.LayerNorm(dim) if norm else nn.Identity()
        self.mixer: Mixer = mixer
        self.mlp: Mixer = mlp
        self.drop_path1 = DropPath(drop_path) if drop_path > 0 else nn.Identity()
        self.drop_path2 = DropPath(drop_path) if drop_path > 0 else nn.Identity()
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        """Apply mixer and FFN, each with position, norm and shortcut: (B, h, w, d) -> the same."""
        x = self.cpe1(x)
        y = self.drop_path1(self.mixer(self.norm1(x)))
        x = self.cpe2(x + y if self.shortcut else y)
        y = self.drop_path2(self.mlp(self.norm2(x)))
        return x + y if self.shortcut else y


class Stem(nn.Module):
    """Five convolutions to a quarter of the size: (B, 3, H, W) -> (B, d, H / 4, W / 4)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        half, hidden = dim // 2, 4 * dim
        self.conv1 = nn.Sequential(*conv_bn(3, half, 3, stride=2), nn.ReLU(inplace=True))
        self.conv2 = nn.Sequential(
            *conv_bn(half, half, 3), nn.ReLU(inplace=True), *conv_bn(half, half, 3)
        )
        self.conv3 = nn.Sequential(
            *conv_bn(half, hidden, 3, stride=2), nn.ReLU(inplace=True), *conv_bn(hidden, dim, 1)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Embed images: (B, 3, H, W) -> (B, d, ceil(H / 4), ceil(W / 4))."""
        x = self.conv1(images)
        return self.conv3(x + self.conv2(x))


def conv_bn(in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    """Build a convolution without bias and its batch norm."""
    conv: nn.Module
    if (kernel, stride) == (1, 1):
        conv = PointwiseConv2d(in_channels, out_channels, bias=False)
    else:
        conv = nn.Conv2d(in_channels, out_channels, kernel, stride, kernel // 2, bias=False)
    return [conv, nn.BatchNorm2d(out_channels)]


def downsampling(dim: int) -> nn.Sequential:
    """Build the inverted bottleneck (B, d, h, w) -> (B, 2 d, ceil(h / 2), ceil(w / 2))."""
    hidden = 8 * dim
    return nn.Sequential(
        PointwiseConv2d(dim, hidden),
        nn.ReLU(inplace=True),
        nn.Conv2d(hidden, hidden, 3, stride=2, padding=1, groups=hidden),
        nn.ReLU(inplace=True),
        PointwiseConv2d(hidden, 2 * dim),
        nn.BatchNorm2d(2 * dim),
    )
