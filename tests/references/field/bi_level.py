"""BiFormer's attention, region by region and head by head."""

import torch

from tests.references.field import attention, depthwise, pointwise
from tests.references.field.window_attention import whole

CASES = [
    {},
    {"topk": 3, "regions": 4, "num_heads": 3},
    {"topk": 4, "regions": 2, "kernel_size": 3},
]


def reference(mixer, x):
    (b, h, w, c), cuts = x.shape, mixer.regions
    height, width = whole(h, cuts), whole(w, cuts)
    padded = x.new_zeros(b, height, width, c)
    padded[:, :h, :w] = x
    q, k, v = pointwise(mixer.qkv, padded).split(c, -1)
    down, right = height // cuts, width // cuts
    places = [
        (slice(i, i + down), slice(j, j + right))
        for i in range(0, height, down)
        for j in range(0, width, right)
    ]
    d, out = c // mixer.num_heads, torch.zeros_like(padded)
    # A scale of C in place of d, which the helper has.
    scale = (d / c) ** 0.5
    for image in range(b):
        means = [[y[image][place].mean((0, 1)) for place in places] for y in (q, k)]
        for one, place in zip(means[0], places, strict=True):
            related = torch.stack([one @ other for other in means[1]])
            chosen = [places[i] for i in related.sort(descending=True).indices[: mixer.topk]]
            keys, values = (
                torch.cat([y[image][other].reshape(-1, c) for other in chosen]) for y in (k, v)
            )
            queries = scale * q[image][place].reshape(-1, c)
            heads = [
                attention(queries[:, s : s + d], keys[:, s : s + d], values[:, s : s + d])
                for s in range(0, c, d)
            ]
            out[image][place] = torch.cat(heads, -1).reshape(down, right, c)
    return pointwise(mixer.proj, out + depthwise(mixer.lepe, v))[:, :h, :w]


def macs(mixer, c, h, w):
    regions, side = mixer.regions**2, mixer.lepe.kernel_size[0]
    padded = whole(h, mixer.regions) * whole(w, mixer.regions)
    keys = mixer.topk * padded // regions
    routing = 2 * regions * c * c + regions**2 * c  # means are projected once more, in float32
    return padded * (3 * c * c + side * side * c + 2 * keys * c) + routing + h * w * c * c
