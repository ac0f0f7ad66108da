"""PolyNeXt's attention head by head, with convolutions as sums of shifted maps."""

import torch

from tests.references.field import depthwise, pointwise

CASES = [{}, {"head_dim": 6, "num_heads": 3}]


def reference(mixer, x):
    (b, h, w, _), wide = x.shape, mixer.q_conv.in_channels
    d = wide // len(mixer.scale)
    u, v = pointwise(mixer.qkv, x).split(wide, -1)
    parts = (depthwise(conv, y) for conv, y in (
        (mixer.q_conv, u), (mixer.k_conv, u), (mixer.v_conv, v)))  # fmt: skip
    q, k, v = (part.reshape(b, h * w, wide) for part in parts)
    heads = []
    for head, start in enumerate(range(0, wide, d)):
        s = 1 / (1 + torch.exp(-mixer.scale[head, 0, 0]))
        part = slice(start, start + d)
        weights = (s * q[..., part] @ k[..., part].mT + 1).square().square()
        heads.append(weights @ v[..., part] / weights.sum(-1, keepdim=True))
    mixed = torch.cat(heads, -1).reshape(b, h, w, wide)
    return pointwise(mixer.proj, depthwise(mixer.final_conv, mixed))


def macs(mixer, c, h, w):
    n, wide = h * w, mixer.q_conv.in_channels
    return n * (3 * wide * c + (25 + 25 + 9 + 9) * wide + 2 * n * wide)
