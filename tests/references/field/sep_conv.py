"""timm's SepConv."""

from timm.models.metaformer import SepConv

from tests.references.field import as_nchw, as_nhwc, through

CASES = [{}, {"expansion": 3, "kernel_size": 5}]


def reference(mixer, x):
    wide, side = mixer.dwconv.in_channels, mixer.dwconv.kernel_size[0]
    layer = SepConv(x.shape[-1], wide / x.shape[-1], kernel_size=side, padding=side // 2)
    return as_nhwc(through(layer, mixer, as_nchw(x), names={"act.": "act1."}))


def macs(mixer, c, h, w):
    wide, _, k, _ = mixer.dwconv.weight.shape
    return h * w * (2 * c * wide + k * k * wide)
