"""The means of Vision-RWKV's equation, by the distance of every pair of tokens."""

import torch

from tests.references.field import pointwise, shifted


def shifted_quarters(x):
    """Quarters of the channels from the left, right, upper and lower neighbour."""
    offsets, q = [(0, -1), (0, 1), (-1, 0), (1, 0)], x.shape[-1] // 4
    parts = [shifted(x[..., n * q : (n + 1) * q], *offset) for n, offset in enumerate(offsets)]
    return torch.cat([*parts, x[..., 4 * q :]], -1)


def reference(mixer, x):
    moved, n = shifted_quarters(x), x.shape[1] * x.shape[2]
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
