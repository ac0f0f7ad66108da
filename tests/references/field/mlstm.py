"""The recurrences of C and n, token by token, without a common scale."""

import torch
import torch.nn.functional as F

from tests.references.field import depthwise, pointwise

CASES = [{}, {"block": 1, "expansion": 1.0, "kernel_size": 5, "num_heads": 3}]


def blockwise(layer, x):
    return x @ torch.block_diag(*layer.weight).T + layer.bias


def recurrent(q, k, v, i, f):
    """One head; (B, N, d) and gates (B, N)."""
    memory, count, outputs = 0.0, 0.0, []
    for t in range(q.shape[1]):
        forget, write = f[:, t].sigmoid()[:, None], i[:, t].exp()[:, None]
        outer = v[:, t, :, None] * k[:, t, None, :]
        memory = forget[..., None] * memory + write[..., None] * outer
        count = forget * count + write * k[:, t]
        read = (memory @ q[:, t, :, None])[..., 0]
        outputs.append(read / (count * q[:, t]).sum(-1).abs().clamp(min=1)[:, None])
    return torch.stack(outputs, 1)


def reference(mixer, x):
    if mixer.is_reversed:
        x = x.flip(1).flip(2)
    inner, heads = mixer.conv.weight.shape[0], mixer.num_heads
    up = pointwise(mixer.proj_up, x)
    m, z = up[..., :inner], up[..., inner:]
    u = F.silu(depthwise(mixer.conv, m))
    parts = [blockwise(mixer.q_proj, u), blockwise(mixer.k_proj, u), blockwise(mixer.v_proj, m)]
    q, k, v = (part.flatten(1, 2) for part in parts)
    i, f = (pointwise(gate, torch.cat([q, k, v], -1)) for gate in (mixer.igate, mixer.fgate))
    d, outputs = inner // heads, []
    for head in range(heads):
        own = slice(head * d, (head + 1) * d)
        read = recurrent(q[..., own], k[..., own] / d**0.5, v[..., own], i[..., head], f[..., head])
        read = read - read.mean(-1, keepdim=True)
        outputs.append(read / (read.square().mean(-1, keepdim=True) + 1e-5).sqrt())
    normed = (1 + mixer.outnorm.weight) * torch.cat(outputs, -1) + mixer.outnorm.bias
    y = normed.reshape(u.shape) + mixer.learnable_skip * u
    y = pointwise(mixer.proj_down, y * F.silu(z))
    return y.flip(1).flip(2) if mixer.is_reversed else y


def macs(mixer, c, h, w):
    n, heads, (inner, *_) = h * w, mixer.num_heads, mixer.conv.weight.shape
    d, width, chunk = inner // heads, mixer.q_proj.weight.shape[1], min(64, n)
    per_token = 3 * c * inner + mixer.conv.kernel_size[0] ** 2 * inner
    per_token += 3 * inner * width + 2 * 3 * inner * heads
    products = chunk * chunk * (2 * d + 1) + 2 * chunk * d * (d + 1)
    chunks = -(-n // chunk)
    # Each chunk's memory is a sum of what at most 64 chunks added.
    return n * per_token + heads * chunks * (products + chunks * d * (d + 1))
