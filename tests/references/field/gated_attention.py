"""Attention head by head, gated after it."""

import torch

from tests.references.field import attention, joint_through, pointwise

CASES = [{}, {"num_heads": 3, "gate": "head", "bias": True}]


def sequence(mixer, tokens):
    c = tokens.shape[-1]
    d = c // mixer.num_heads
    q, k, v = pointwise(mixer.qkv, tokens).split(c, -1)
    gates = 1 / (1 + torch.exp(-pointwise(mixer.gate, tokens)))
    gates = gates.repeat_interleave(c // gates.shape[-1], -1)
    heads = [
        attention(q[..., i : i + d], k[..., i : i + d], v[..., i : i + d]) for i in range(0, c, d)
    ]
    return pointwise(mixer.proj, torch.cat(heads, -1) * gates)


def reference(mixer, x):
    return sequence(mixer, x.flatten(1, 2)).reshape(x.shape)


def joint(mixer, x, prefix):
    return joint_through(sequence, mixer, x, prefix)


def macs(mixer, c, h, w):
    n = h * w
    return n * (4 * c * c + c * mixer.gate.out_features + 2 * n * c)
