"""MLLA with a weight per pair of tokens, and rotations as products of complex numbers."""

import torch

from tests.references.field import depthwise, pointwise

CASES = [{}, {"num_heads": 3, "qkv_bias": False}]


def silu(x):
    return x / (1 + torch.exp(-x))


def positive(x):
    """ELU(x) + 1."""
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def turned(x, inclusive=False):
    """Turn pairs of channels (B, H, W, d): the first half by the row, the second by the column."""
    (h, w), count = x.shape[1:3], x.shape[-1] // 4
    steps = max(count - 1 if inclusive else count, 1)
    frequencies = torch.tensor([10000 ** -(m / steps) for m in range(count)], dtype=torch.float64)
    angles = torch.stack(
        [torch.stack([torch.cat([i * frequencies, j * frequencies]) for j in range(w)])
         for i in range(h)]
    )  # fmt: skip
    pairs = torch.complex(x[..., ::2], x[..., 1::2]) * torch.polar(torch.ones_like(angles), angles)
    return torch.stack([pairs.real, pairs.imag], -1).flatten(-2)


def weighted(q, k, v, turned_q, turned_k):
    """Sum of values by turned queries and keys, over that by the others, in one head (B, N, d)."""
    n = k.shape[1]
    return (turned_q @ turned_k.mT) @ v / n / ((q @ k.mT).sum(-1, keepdim=True) / n + 1e-6)


def reference(mixer, x):
    c, n = x.shape[-1], x.shape[1] * x.shape[2]
    u = silu(depthwise(mixer.dwc, pointwise(mixer.in_proj, x)))
    q, k = (positive(part) for part in pointwise(mixer.qk, u).split(c, -1))
    parts = (part.reshape(len(x), n, c) for part in (q, k, u, turned(q), turned(k)))
    heads = zip(*(part.chunk(mixer.num_heads, -1) for part in parts), strict=True)
    mixed = torch.cat([weighted(*head) for head in heads], -1).reshape(x.shape)
    gate = silu(pointwise(mixer.act_proj, x))
    return pointwise(mixer.out_proj, (mixed + depthwise(mixer.lepe, u)) * gate)


def macs(mixer, c, h, w):
    return h * w * (5 * c * c + 18 * c + 2 * c * c // mixer.num_heads + c)
