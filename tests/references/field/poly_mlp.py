"""Products of the two halves, normed by their moments."""

from tests.references.field import pointwise

CASES = [{}, {"expansion": 1.75}]


def reference(mixer, x):
    half = mixer.fc2.in_features
    y = pointwise(mixer.fc1, x)
    y = y[..., :half] * y[..., half:]
    y = y - y.mean(-1, keepdim=True)
    y = y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * mixer.norm.weight
    return pointwise(mixer.fc2, y)


def macs(mixer, c, h, w):
    return h * w * 3 * c * mixer.fc2.in_features
