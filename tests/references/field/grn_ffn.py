"""timm's GlobalResponseNormMlp of ConvNeXt V2."""

from timm.layers import GlobalResponseNormMlp

from tests.references.field import through


def reference(mixer, x):
    return through(GlobalResponseNormMlp(x.shape[-1], 4 * x.shape[-1]), mixer, x)


def macs(mixer, c, h, w):
    return h * w * 8 * c * c
