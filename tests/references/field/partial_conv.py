"""timm's Partial_conv3 of FasterNet."""

from timm.models.fasternet import Partial_conv3

from tests.references.field import as_nchw, as_nhwc, through


def reference(mixer, x):
    layer = Partial_conv3(x.shape[-1], x.shape[-1] // mixer.parts[0], "split_cat")
    names = {"conv.": "partial_conv3."}
    return as_nhwc(through(layer, mixer, as_nchw(x), names=names))


def macs(mixer, c, h, w):
    return h * w * (3 * c // 4) ** 2
