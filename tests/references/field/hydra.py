"""Attention with a head per channel: a weight for each pair of tokens and channel."""

import torch

from tests.references.field import joint_through, pointwise

CASES = [{}, {"qkv_bias": False}]


def unit(x):
    return x / x.square().sum(-1, keepdim=True).sqrt()


def sequence(mixer, tokens):
    q, k, v = pointwise(mixer.qkv, tokens).chunk(3, -1)
    q, k = unit(q), unit(k)
    mixed = [((row[:, None] * k) * v).sum(1) for row in q.unbind(1)]
    return pointwise(mixer.proj, torch.stack(mixed, 1))


def reference(mixer, x):
    return sequence(mixer, x.flatten(1, 2)).reshape(x.shape)


def joint(mixer, x, prefix):
    return joint_through(sequence, mixer, x, prefix)


def macs(mixer, c, h, w):
    return 4 * h * w * c * c
