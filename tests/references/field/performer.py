"""FAVOR+ with a weight per pair of tokens, head by head."""

import torch

from tests.references.field import joint_through, pointwise

CASES = [{}, {"num_heads": 3, "features": 11, "seed": 5, "qkv_bias": False}]


def features(mixer, x, axes):
    directions = mixer.directions.double()
    x = x / x.shape[-1] ** 0.25
    exponents = torch.einsum("bnd,rd->bnr", x, directions)
    largest = exponents.amax(axes, keepdim=True)
    exponents = exponents - (x * x).sum(-1, keepdim=True) / 2 - largest
    return (exponents.exp() + 1e-4) / len(directions) ** 0.5


def sequence(mixer, tokens):
    heads = []
    parts = pointwise(mixer.qkv, tokens).chunk(3, -1)
    for q, k, v in zip(*(part.chunk(mixer.num_heads, -1) for part in parts), strict=True):
        weights = features(mixer, q, (2,)) @ features(mixer, k, (1, 2)).mT
        heads.append(weights @ v / weights.sum(-1, keepdim=True))
    return pointwise(mixer.proj, torch.cat(heads, -1))


def reference(mixer, x):
    return sequence(mixer, x.flatten(1, 2)).reshape(x.shape)


def joint(mixer, x, prefix):
    return joint_through(sequence, mixer, x, prefix)


def macs(mixer, c, h, w):
    count, heads = len(mixer.directions), mixer.num_heads
    return h * w * (4 * c * c + 4 * count * c + count * heads)
