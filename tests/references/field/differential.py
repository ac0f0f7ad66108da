"""Differential attention head by head; timm's DiffAttention rounds lambda to float32."""

import torch

from tests.references.field import attention, joint_through, pointwise

CASES = [{}, {"num_heads": 3, "block": 2, "bias": True}, {"depth": 5}]


def sequence(mixer, tokens):
    c, start = tokens.shape[-1], mixer.lambda_init
    wide = c // mixer.num_heads
    d = wide // 2
    q, k, v = pointwise(mixer.qkv, tokens).split(c, -1)
    factor = (mixer.lambda_q1 @ mixer.lambda_k1).exp() + start
    factor = factor - (mixer.lambda_q2 @ mixer.lambda_k2).exp()
    heads = []
    for i in range(0, c, wide):
        one, other = (
            attention(q[..., j : j + d], k[..., j : j + d], v[..., i : i + wide])
            for j in (i, i + d)
        )
        y = one - factor * other
        y = y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * mixer.sub_norm.weight
        heads.append((1 - start) * y)
    return pointwise(mixer.proj, torch.cat(heads, -1))


def reference(mixer, x):
    return sequence(mixer, x.flatten(1, 2)).reshape(x.shape)


def joint(mixer, x, prefix):
    return joint_through(sequence, mixer, x, prefix)


def macs(mixer, c, h, w):
    n = h * w
    return n * (4 * c * c + n * c + 2 * n * c)
