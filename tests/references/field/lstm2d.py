"""timm's LSTM2d."""

from timm.models.sequencer import LSTM2d

from tests.references.field import through

CASES = [{}, {"expansion": 0.5}]


def reference(mixer, x):
    return through(LSTM2d(x.shape[-1], mixer.fc.in_features // 4), mixer, x)


def macs(mixer, c, h, w):
    hidden = mixer.fc.in_features // 4
    return h * w * (2 * 2 * 4 * hidden * (c + hidden) + 4 * hidden * c)
