"""RALA with a weight per pair of tokens, head by head."""

import torch

from tests.references.field import depthwise, pointwise
from tests.references.field.mlla import positive, turned, weighted

CASES = [{}, {"num_heads": 3, "qkv_bias": False}, {"inclusive": False, "num_heads": 2}]


def reference(mixer, x):
    (b, h, w, c), n = x.shape, x.shape[1] * x.shape[2]
    q, k, v, o = pointwise(mixer.qkvo, x).split(c, -1)
    heads = []
    for one_q, one_k, one_v in zip(
        *(part.chunk(mixer.num_heads, -1) for part in (positive(q), positive(k), v)), strict=True
    ):
        scores = (one_k * one_q.mean((1, 2), keepdim=True)).sum(-1) * one_q.shape[-1] ** -0.5
        share = scores.flatten(1).softmax(-1).reshape(b, h, w, 1)
        one_k = n * share * one_k
        parts = (one_q, one_k, one_v, *(turned(y, mixer.inclusive) for y in (one_q, one_k)))
        heads.append(weighted(*(part.flatten(1, 2) for part in parts)))
    mixed = torch.cat(heads, -1).reshape(x.shape)
    return pointwise(mixer.proj, o * (mixed + depthwise(mixer.lepe, v)))


def macs(mixer, c, h, w):
    return h * w * (5 * c * c + 25 * c + 2 * c * c // mixer.num_heads + 2 * c)
