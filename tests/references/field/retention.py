"""Manhattan self-attention, one token and one head at a time."""

import math

import torch

from tests.references.field import depthwise, pointwise

CASES = [
    {},
    {"decomposed": False, "num_heads": 3},
    {"num_heads": 2, "decay_range": 6.0, "kernel_size": 3},
    {"form": "paper"},
    {"form": "paper", "decomposed": False, "num_heads": 3},
]


def attend(form, q, keys, values, distances, decay):
    """One query (B, d), keys and values (B, M, d) at distances (M)."""
    logits = torch.einsum("bd,bmd->bm", q, keys) * q.shape[-1] ** -0.5
    distances = torch.tensor(distances, dtype=q.dtype)
    if form == "paper":
        weights = logits.softmax(-1) * decay**distances
    else:
        weights = (logits + distances * math.log(decay)).softmax(-1)
    return torch.einsum("bm,bmd->bd", weights, values)


def turned(x):
    """Pairs of channels as complex numbers, turned by the token's index in row-major order."""
    h, w, d = x.shape[1:]
    frequencies = 10000 ** -torch.linspace(0, 1, d // 2, dtype=x.dtype)
    angles = (torch.arange(h * w, dtype=x.dtype)[:, None] * frequencies).reshape(h, w, -1)
    pairs = torch.complex(x[..., ::2], x[..., 1::2]) * torch.polar(torch.ones_like(angles), angles)
    return torch.stack([pairs.real, pairs.imag], -1).flatten(-2)


def reference(mixer, x):
    (h, w), heads = x.shape[1:3], []
    everywhere = [(a, b) for a in range(h) for b in range(w)]
    parts = pointwise(mixer.qkv, x).chunk(3, -1)
    for head, (q, k, v) in enumerate(
        zip(*(part.chunk(mixer.num_heads, -1) for part in parts), strict=True)
    ):
        form, decay = mixer.form, mixer.decays[head]
        if form == "released":
            q, k = turned(q), turned(k)
        if mixer.decomposed:
            rows = [
                attend(form, q[:, i, j], k[:, i], v[:, i], [abs(j - b) for b in range(w)], decay)
                for i, j in everywhere
            ]
            v = torch.stack(rows, 1).reshape(v.shape)
            mixed = [
                attend(
                    form, q[:, i, j], k[:, :, j], v[:, :, j], [abs(i - a) for a in range(h)], decay
                )
                for i, j in everywhere
            ]
        else:
            flat_k, flat_v = k.flatten(1, 2), v.flatten(1, 2)
            mixed = [
                attend(
                    form,
                    q[:, i, j],
                    flat_k,
                    flat_v,
                    [abs(i - a) + abs(j - b) for a, b in everywhere],
                    decay,
                )
                for i, j in everywhere
            ]
        heads.append(torch.stack(mixed, 1).reshape(v.shape))
    return pointwise(mixer.proj, torch.cat(heads, -1) + depthwise(mixer.lepe, parts[2]))


def macs(mixer, c, h, w):
    n, side = h * w, mixer.lepe.kernel_size[0]
    keys = h + w if mixer.decomposed else n
    return n * (4 * c * c + side * side * c + 2 * keys * c)
