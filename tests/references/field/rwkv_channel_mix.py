"""Vision-RWKV's equation with maps that are shifted token by token."""

from tests.references.field import pointwise
from tests.references.field.bi_wkv import shifted_quarters

DIM = 26  # quarters of 6, 7, 6 and 7 channels, as 4 does not divide it
CASES = [{}, {"hidden_ratio": 1.5}, {"whole_quarters": True}]


def reference(mixer, x):
    moved = shifted_quarters(mixer, x)
    given, gate = (x * m + moved * (1 - m) for m in (mixer.mix_k, mixer.mix_r))
    value = pointwise(mixer.value, pointwise(mixer.key, given).clamp(min=0) ** 2)
    return pointwise(mixer.receptance, gate).sigmoid() * value


def macs(mixer, c, h, w):
    return h * w * (c * c + 2 * c * mixer.key.out_features)
