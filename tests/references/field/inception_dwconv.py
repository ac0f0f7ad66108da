"""timm's InceptionDWConv2d."""

from timm.models.inception_next import InceptionDWConv2d

from tests.references.field import as_nchw, as_nhwc, through

CASES = [{}, {"kernel_size": 5, "band": 7, "ratio": 0.25}]


def reference(mixer, x):
    sides = mixer.dwconv_hw.kernel_size[0], mixer.dwconv_w.kernel_size[1]
    layer = InceptionDWConv2d(x.shape[-1], *sides, mixer.parts[1] / x.shape[-1])
    return as_nhwc(through(layer, mixer, as_nchw(x)))


def macs(mixer, c, h, w):
    kernels = (mixer.dwconv_hw, mixer.dwconv_w, mixer.dwconv_h)
    return h * w * mixer.parts[1] * sum(k.kernel_size[0] * k.kernel_size[1] for k in kernels)
