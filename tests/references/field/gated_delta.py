"""The recurrence of the memory S, token by token, one direction and head after the other."""

import torch
import torch.nn.functional as F

from tests.references.field import pointwise

CASES = [{}, {"num_heads": 3, "key_ratio": 0.5, "value_ratio": 1.0, "kernel_size": 2}]


def directed(mixer, tokens):
    """Output of one direction, (B, N, h, e)."""
    heads, taps, n = mixer.num_heads, mixer.conv.weight[:, 0], tokens.shape[1]
    linear = pointwise(mixer.qkv, tokens)
    convolved = torch.zeros_like(linear)
    for back in range(taps.shape[1]):
        moved = F.pad(linear, (0, 0, back, 0))[:, :n]
        convolved = convolved + moved * taps[:, -1 - back]
    q, k, v = (
        part.reshape(*part.shape[:2], heads, -1)
        for part in F.silu(convolved).split(mixer.widths, -1)
    )
    q, k = (part / part.norm(dim=-1, keepdim=True) for part in (q, k))
    beta = pointwise(mixer.beta, tokens).sigmoid()
    alpha = (-mixer.A_log.exp() * F.softplus(pointwise(mixer.step, tokens) + mixer.dt_bias)).exp()
    state, outputs = torch.zeros(len(v), heads, v.shape[-1], k.shape[-1], dtype=v.dtype), []
    identity = torch.eye(k.shape[-1], dtype=v.dtype)
    for t in range(n):
        key, rate = k[:, t], beta[:, t, :, None, None]
        kept = identity - rate * key[..., None] * key[..., None, :]
        state = alpha[:, t, :, None, None] * state @ kept
        state = state + rate * v[:, t, :, :, None] * key[..., None, :]
        outputs.append((state @ q[:, t, :, :, None])[..., 0])
    return torch.stack(outputs, 1) / k.shape[-1] ** 0.5


def reference(mixer, x):
    tokens = x.flatten(1, 2)
    o = directed(mixer, tokens) + directed(mixer, tokens.flip(1)).flip(1)
    o = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * mixer.norm.weight
    y = pointwise(mixer.proj, o.flatten(2) * F.silu(pointwise(mixer.gate, tokens)))
    return y.reshape(x.shape)


def macs(mixer, c, h, w):
    n, heads = h * w, mixer.num_heads
    key, value = mixer.widths[0] // heads, mixer.widths[2] // heads
    chunk = min(32, n)
    chunks = -(-n // chunk)
    wide, given = sum(mixer.widths), heads * value
    both = 2 * n * (c * wide + wide * mixer.conv.kernel_size[0] + 2 * c * heads)
    products = 3 * chunk * chunk * key + 2 * chunk * chunk * value + 3 * chunk * key * value
    solving = chunk * (chunk - 1) // 2 * chunk
    return both + 2 * heads * chunks * (products + solving) + n * 2 * c * given
