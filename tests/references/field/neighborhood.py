"""Neighbourhood attention, one token at a time."""

import torch

from tests.references.field import attention, pointwise

CASES = [
    {},
    {"kernel_size": 3, "num_heads": 3},
    {"kernel_size": 5, "dilation": 2},
    {"kernel_size": 11, "dilation": 1},
]


def near(place, length, k, dilation):
    """Neighbours of a place: the k nearest of every t-th place, as central as the map allows."""
    places = list(range(place % dilation, length, dilation))
    first = min(max(places.index(place) - k // 2, 0), max(len(places) - k, 0))
    return places[first : first + k]


def reference(mixer, x):
    (_, h, w, c), k, t = x.shape, mixer.side, mixer.dilation
    d = c // mixer.num_heads
    q, keys, values = pointwise(mixer.qkv, x).split(c, -1)
    rows = []
    for i in range(h):
        for j in range(w):
            around = [(a, b) for a in near(i, h, k, t) for b in near(j, w, k, t)]
            down, right = torch.tensor(around).T
            bias = mixer.rpb[:, (down - i) // t + k - 1, (right - j) // t + k - 1]
            heads = [
                attention(
                    q[:, i, j, None, s : s + d],
                    keys[:, down, right, s : s + d],
                    values[:, down, right, s : s + d],
                    bias[s // d],
                )
                for s in range(0, c, d)
            ]
            rows.append(torch.cat(heads, -1)[:, 0])
    return pointwise(mixer.proj, torch.stack(rows, 1).reshape(x.shape))


def macs(mixer, c, h, w):
    k, t = mixer.side, mixer.dilation
    near_rows, near_columns = (min(k, -(-side // t)) for side in (h, w))
    return h * w * (4 * c * c + 2 * near_rows * near_columns * c)
