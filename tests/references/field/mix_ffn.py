"""timm's MlpWithDepthwiseConv of PVT v2."""

from timm.models.pvt_v2 import MlpWithDepthwiseConv

from tests.references.field import through

CASES = [{}, {"relu": True, "hidden_ratio": 2}]


def reference(mixer, x):
    _, h, w, c = x.shape
    layer = MlpWithDepthwiseConv(c, mixer.fc1.out_channels, extra_relu=mixer.relu)
    return through(layer, mixer, x.flatten(1, 2), (h, w)).reshape(x.shape)


def macs(mixer, c, h, w):
    hidden = mixer.fc1.out_channels
    return h * w * (2 * c * hidden + 9 * hidden)
