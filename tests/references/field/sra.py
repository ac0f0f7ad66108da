"""timm's Attention of PVT v2; with prefix tokens, attention written out."""

import torch
import torch.nn.functional as F
from timm.models.pvt_v2 import Attention

from tests.references.field import attention, pointwise, through

CASES = [{}, {"reduction": 4, "num_heads": 3}, {"reduction": 1}, {"linear": True, "pool": 7}]


def reference(mixer, x):
    (_, h, w, c), heads = x.shape, mixer.num_heads
    keys = mixer.reduce
    side = 1 if keys.sr is None else keys.sr.kernel_size[0]
    layer = Attention(c, heads, sr_ratio=side, linear_attn=keys.pool is not None)
    y = through(layer, mixer, x.flatten(1, 2), (h, w), names={"reduce.": ""})
    return y.reshape(x.shape)


def reduced(mixer, x):
    """The normed tokens of the reduced map, one window at a time."""
    keys, (h, w) = mixer.reduce, x.shape[1:3]
    if keys.sr is None:
        return x.flatten(1, 2)
    side, tokens = keys.sr.kernel_size[0], []
    if keys.pool is None:
        for i in range(0, h - side + 1, side):
            for j in range(0, w - side + 1, side):
                window = x[:, i : i + side, j : j + side]
                tokens.append(torch.einsum("bijc,ocij->bo", window, keys.sr.weight))
    else:
        n = keys.pool
        for i in range(n):
            for j in range(n):
                rows = slice(i * h // n, -(-(i + 1) * h // n))
                window = x[:, rows, j * w // n : -(-(j + 1) * w // n)]
                tokens.append(window.mean((1, 2)) @ keys.sr.weight[:, :, 0, 0].T)
    tokens = torch.stack(tokens, 1) + keys.sr.bias
    tokens = F.layer_norm(tokens, tokens.shape[-1:], keys.norm.weight, keys.norm.bias)
    return tokens if keys.pool is None else F.gelu(tokens)


def joint(mixer, x, prefix):
    c, heads = x.shape[-1], mixer.num_heads
    tokens = torch.cat([prefix, x.flatten(1, 2)], 1)
    kv = pointwise(mixer.kv, torch.cat([prefix, reduced(mixer, x)], 1))
    parts = (pointwise(mixer.q, tokens), kv[..., :c], kv[..., c:])
    q, k, v = (part.reshape(len(x), -1, heads, c // heads).transpose(1, 2) for part in parts)
    y = pointwise(mixer.proj, attention(q, k, v).transpose(1, 2).flatten(2))
    return y[:, prefix.shape[1] :].reshape(x.shape), y[:, : prefix.shape[1]]


def macs(mixer, c, h, w):
    n, keys = h * w, mixer.reduce
    if keys.pool is not None:
        m = keys.pool**2
        return 2 * n * c * c + m * c * c + 2 * m * c * c + 2 * n * m * c
    side = 1 if keys.sr is None else keys.sr.kernel_size[0]
    m = (h // side) * (w // side)
    reducing = m * side * side * c * c if side > 1 else 0
    return 2 * n * c * c + reducing + 2 * m * c * c + 2 * n * m * c
