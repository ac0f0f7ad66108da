"""The inner step by autograd, one image and head at a time, and complex rotary positions."""

import torch
import torch.nn.functional as F

from tests.references.field import pointwise

CASES = [{}, {"num_heads": 3, "rate": 0.5, "rope": True, "qkv_bias": False}]


def turned(x):
    """Multiply pairs of channels by powers of complex numbers of length 1."""
    _, h, w, c = x.shape
    rates = [10000 ** (-p / (c // 4)) for p in range(c // 4)]
    angles = [[[i * r for r in rates] + [j * r for r in rates] for j in range(w)] for i in range(h)]
    angles = torch.tensor(angles, dtype=torch.float64)
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def stepped(mixer, loss, weights, axes):
    gradients = torch.autograd.grad(loss, weights, create_graph=True)
    clipped = (g / (g.norm(dim=axes, keepdim=True) + 1) for g in gradients)
    return [w - mixer.rate * g for w, g in zip(weights, clipped, strict=True)]


def gated(x, w1, w2):
    return (x @ w1) * F.silu(x @ w2)


def reference(mixer, x):
    q, k, v, around = pointwise(mixer.qkv, x).split(mixer.widths, -1)
    if mixer.rope:
        q, k = turned(q), turned(k)
    c, heads, images = x.shape[-1], mixer.num_heads, []
    d = c // heads
    for image in range(len(x)):
        parts = []
        for head in range(heads):
            own = (image, ..., slice(head * d, (head + 1) * d))
            weights = [mixer.w1[head], mixer.w2[head]]
            loss = -(gated(k[own], *weights) * v[own]).sum(-1).mean() / 3
            parts.append(gated(q[own], *stepped(mixer, loss, weights, 0)))
        query, key, value = around[image].permute(2, 0, 1)[None].chunk(3, dim=1)
        kernel = mixer.w3.reshape(d, 1, 3, 3)
        found = F.conv2d(key, kernel, padding=1, groups=d)
        loss = -(found * value).mean((0, 2, 3)).sum() / 3
        (kernel,) = stepped(mixer, loss, [kernel], (2, 3))
        parts.append(F.conv2d(query, kernel, padding=1, groups=d)[0].permute(1, 2, 0))
        images.append(torch.cat(parts, -1))
    return pointwise(mixer.proj, torch.stack(images))


def macs(mixer, c, h, w):
    d = c // mixer.num_heads
    return h * w * (c * (3 * c + 3 * d) + 6 * c * d + 2 * 9 * d + (c + d) * c)
