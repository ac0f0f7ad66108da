"""timm's GatedConvBlock of MambaOut, without its norm and shortcut."""

from timm.models.mambaout import GatedConvBlock
from torch import nn

from tests.references.field import through

CASES = [{}, {"expansion": 2.0, "kernel_size": 3, "conv_ratio": 0.5}]


def reference(mixer, x):
    hidden, part = mixer.fc2.in_features, mixer.parts[1]
    c, side = x.shape[-1], mixer.conv.kernel_size[0]
    ratios = (hidden + 0.5) / c, side, (part + 0.5) / c
    layer = GatedConvBlock(c, *ratios, norm_layer=nn.Identity)
    return through(layer, mixer, x) - x


def macs(mixer, c, h, w):
    hidden, part, k = mixer.fc2.in_features, mixer.parts[1], mixer.conv.kernel_size[0]
    return h * w * (3 * c * hidden + k * k * part)
