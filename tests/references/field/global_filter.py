"""A Fourier transform that is written out."""

import math

from tests.references.field.gnconv import by_matrices


def reference(mixer, x):
    return by_matrices(x, mixer.at_size("filter", x.shape[1:3]))


def macs(mixer, c, h, w):
    return round(4 * h * (w // 2 + 1) * c + 2 * h * w * c * math.log2(h * w))
