"""TransNeXt's aggregated attention, one token and one head at a time."""

import math

import torch
import torch.nn.functional as F

from tests.references.field import as_nchw, as_nhwc, pointwise

CASES = [
    {},
    {"reduction": 2, "num_heads": 3, "window": 5},
    {"reduction": 1, "num_heads": 2},
    {"reduction": 4, "grid": (6, 10)},
]


def unit(x):
    return x / x.square().sum(-1, keepdim=True).sqrt()


def offset(difference, grid):
    scaled = difference / (grid - 1) * 8
    return math.copysign(math.log(abs(scaled) + 1, 8), scaled)


def bias(position, place, centres):
    """Bias of one token with each key (h, M), by the MLP on each pair."""
    (i, j), (height, width) = place, position.grid
    pairs = [[offset(i - a, height), offset(j - b, width)] for a, b in centres]
    hidden = pointwise(position.fc1, torch.tensor(pairs, dtype=torch.float64)).clamp(min=0)
    return pointwise(position.fc2, hidden).T


def parts(length, count):
    return [(i * length // count, -(-(i + 1) * length // count)) for i in range(count)]


def reference(mixer, x):
    (_, h, w, c), attn = x.shape, mixer.attn
    heads = len(attn.queries.embedding)
    cut = (*x.shape[:3], heads, c // heads)
    queries = unit(pointwise(attn.queries.proj, x).reshape(cut))
    keys, values = (part.reshape(cut) for part in pointwise(attn.kv, x).split(c, -1))
    keys, temperature = unit(keys), (1 + attn.queries.temperature.flatten().exp()).log()
    pools = hasattr(attn, "reduction")
    r = attn.reduction if pools else 1
    rows, columns = parts(h, max(1, h // r)), parts(w, max(1, w // r))
    centres = [((a + b - 1) / 2, (d + e - 1) / 2) for a, b in rows for d, e in columns]
    far_keys, far_values = keys.flatten(1, 2), values.flatten(1, 2)
    if pools:
        y = F.gelu(as_nhwc(F.conv2d(as_nchw(x), attn.pool_proj.weight, attn.pool_proj.bias)))
        y = torch.stack([y[:, a:b, d:e].mean((1, 2)) for a, b in rows for d, e in columns], 1)
        y = F.layer_norm(y, (c,), attn.norm.weight, attn.norm.bias)
        far_keys, far_values = (
            part.reshape(len(x), -1, *cut[3:]) for part in pointwise(attn.kv, y).split(c, -1)
        )
        far_keys = unit(far_keys)
    reach = attn.window // 2 if pools else -1
    around = range(-reach, reach + 1)
    out = []
    for i in range(h):
        for j in range(w):
            near = [
                (place, i + a, j + b)
                for place, (a, b) in enumerate((a, b) for a in around for b in around)
                if 0 <= i + a < h and 0 <= j + b < w
            ]
            places, down, right = ([one[axis] for one in near] for axis in range(3))
            query = queries[:, i, j]
            scale = temperature * math.log(len(near) + len(centres))
            q = (query + attn.queries.embedding[:, 0]) * scale[:, None]
            logits = torch.einsum("bhd,bmhd->bhm", q, far_keys)
            logits = logits + bias(attn.position, (i, j), centres)
            if pools:
                local = torch.einsum("bhd,bkhd->bhk", q, keys[:, down, right])
                logits = torch.cat([local + attn.near_bias[:, 0, places], logits], -1)
            weights = logits.softmax(-1)
            mixed = torch.einsum("bhm,bmhd->bhd", weights[..., len(near) :], far_values)
            if pools:
                learnt = torch.einsum("bhd,hdk->bhk", query, attn.learnt_tokens[..., places])
                local = weights[..., : len(near)] + learnt + attn.learnt_bias[:, 0, places]
                mixed = mixed + torch.einsum("bhk,bkhd->bhd", local, values[:, down, right])
            out.append(mixed.flatten(1))
    return pointwise(attn.proj, torch.stack(out, 1).reshape(x.shape))


def macs(mixer, c, h, w):
    n, attn = h * w, mixer.attn
    r = getattr(attn, "reduction", 1)
    pooled = [max(1, side // r) for side in (h, w)]
    m, table = pooled[0] * pooled[1], 1
    for side, count in zip((h, w), pooled, strict=True):
        centres = [a + b - 1 for a, b in parts(side, count)]
        step = 2 if side % count == 0 else 1
        table *= (2 * (side - 1) - centres[0] + centres[-1]) // step + 1
    hidden, heads = attn.position.fc2.in_features, attn.position.fc2.out_features
    total = table * hidden * (2 + heads) + n * (4 * c * c + 2 * m * c)
    if hasattr(attn, "reduction"):
        total += n * c * c + 2 * m * c * c + 3 * n * attn.window**2 * c
    return total
