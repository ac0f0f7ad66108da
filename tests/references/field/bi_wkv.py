"""The means of Vision-RWKV's equation, by the distance of every pair of tokens."""

import torch

from tests.references.field import pointwise, shifted

DIM = 26  # quarters of 6, 7, 6 and 7 channels, as 4 does not divide it
CASES = [{}, {"whole_quarters": True}]


def shifted_quarters(mixer, x):
    """Quarters of the channels from the left, right, upper and lower neighbour."""
    c, y = x.shape[-1], x.clone()
    ends = [0, int(c / 4), int(c / 2), int(3 * c / 4), c]
    if mixer.whole_quarters:
        ends = [n * int(c / 4) for n in range(5)]
    for n, offset in enumerate([(0, -1), (0, 1), (-1, 0), (1, 0)]):
        part = slice(ends[n], ends[n + 1])
        y[..., part] = shifted(x[..., part], *offset)
    return y


def reference(mixer, x):
    moved, n = shifted_quarters(mixer, x), x.shape[1] * x.shape[2]
    k, v, r = (
        pointwise(layer, x * mix + moved * (1 - mix)).flatten(1, 2)
        for layer, mix in (
            (mixer.key, mixer.mix_k),
            (mixer.value, mixer.mix_v),
            (mixer.receptance, mixer.mix_r),
        )
    )
    means = []
    for t in range(n):
        distance = (torch.arange(n) - t).abs()[:, None]
        exponent = torch.where(distance == 0, mixer.bonus / n, -(distance - 1) * mixer.decay / n)
        weights = (exponent + k).exp()
        means.append((weights * v).sum(1) / weights.sum(1))
    gated = r.sigmoid() * torch.stack(means, 1)
    return pointwise(mixer.output, gated).reshape(x.shape)


def macs(mixer, c, h, w):
    return h * w * 4 * c * c
