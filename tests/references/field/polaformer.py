"""PolaFormer's attention with a weight per pair of tokens, head by head."""

import torch

from tests.references.field import pointwise
from tests.references.field.focused_linear import local, table
from tests.references.field.mlla import weighted

CASES = [{}, {"num_heads": 3, "alpha": 2.0, "kernel_size": 3, "qkv_bias": False}]


def reference(mixer, x):
    tokens, c = x.flatten(1, 2), x.shape[-1]
    q, g = pointwise(mixer.qg, tokens).split(c, -1)
    k, v = pointwise(mixer.kv, tokens).split(c, -1)
    k = k + table(mixer, *x.shape[1:3])
    scale = (1 + mixer.scale.exp()).log()
    exponents = 1 + mixer.alpha / (1 + torch.exp(-mixer.power.flatten()))
    # Powers of both signs.
    q, k = (
        [torch.where(s * y > 0, s * y, 0).clamp(min=0) ** exponents for s in (1, -1)]
        for y in (q / scale, k / scale)
    )
    heads, d = [], c // mixer.num_heads
    for start in range(0, c, d):
        part, half = slice(start, start + d), start + d // 2
        (plus, minus), keys = (y[..., part] for y in q), torch.cat([y[..., part] for y in k], -1)
        for pair, values in (
            ((plus, minus), v[..., start:half]),
            ((minus, plus), v[..., half : start + d]),
        ):
            queries = torch.cat(pair, -1)
            heads.append(weighted(queries, keys, values, queries, keys))
    mixed = torch.cat(heads, -1) + local(mixer, v.reshape(x.shape)).flatten(1, 2)
    return pointwise(mixer.proj, mixed * g).reshape(x.shape)


def macs(mixer, c, h, w):
    side, heads = mixer.dwc.kernel_size[0], mixer.num_heads
    return h * w * (5 * c * c + side * side * c + 2 * (2 * c * c // heads + 2 * c))
