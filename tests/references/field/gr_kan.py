"""Powers of every channel, summed by its group's coefficients."""

import torch

from tests.references.field import pointwise

CASES = [{}, {"groups": 3, "hidden_ratio": 2, "start": "swish"}]


def rational(act, x):
    width, parts = x.shape[-1] // len(act.weight_denominator), []
    for channel in range(x.shape[-1]):
        z = x[..., channel]
        top = sum(a * z**n for n, a in enumerate(act.weight_numerator[0]))
        b = act.weight_denominator[channel // width]
        parts.append(top / (1 + sum(b[n] * z ** (n + 1) for n in range(4)).abs()))
    return torch.stack(parts, -1)


def reference(mixer, x):
    hidden = pointwise(mixer.fc1, rational(mixer.act1, x))
    return pointwise(mixer.fc2, rational(mixer.act2, hidden))


def macs(mixer, c, h, w):
    return h * w * 2 * c * mixer.fc1.out_features
