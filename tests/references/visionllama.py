"""Pyramid-VisionLLaMA under its authors' names, written plainly with complex numbers.

Source: Chu et al., "VisionLLaMA", ECCV 2024, and the names and shapes of the released checkpoints.
"""

import torch
import torch.nn.functional as F

from tests.references.cyclemlp import conv, linear, norm, pair

WIDTHS = {
    "visionllama_s": (64, 128, 256, 512),
    "visionllama_b": (96, 192, 384, 768),
    "visionllama_l": (128, 256, 512, 1024),
}
DEPTHS = {"visionllama_s": (2, 2, 10, 4)}
DEPTHS |= dict.fromkeys(("visionllama_b", "visionllama_l"), (2, 2, 18, 2))
HIDDEN = {
    "visionllama_s": (256, 512, 768, 1536),
    "visionllama_b": (256, 512, 1024, 2048),
    "visionllama_l": (512, 768, 1536, 2816),
}
REDUCTIONS = (8, 4, 2, 1)


def shapes(name):
    """Names and shapes of a released checkpoint."""
    widths = WIDTHS[name]
    for stage, (dim, depth) in enumerate(zip(widths, DEPTHS[name], strict=True)):
        inputs, side = (widths[stage - 1], 2) if stage else (3, 4)
        yield from conv(f"patch_embeds.{stage}.proj", inputs, dim, side)
        yield from pair(f"patch_embeds.{stage}.norm", (dim,))
        for index in range(depth):
            block = f"blocks.{stage}.{index}"
            yield f"{block}.gamma_1", (dim,)
            yield f"{block}.gamma_2", (dim,)
            yield from pair(f"{block}.norm1", (dim,))
            yield from pair(f"{block}.norm2", (dim,))
            hidden = HIDDEN[name][stage]
            yield f"{block}.mlp.c_fc1.weight", (hidden, dim)
            yield f"{block}.mlp.c_fc2.weight", (hidden, dim)
            yield f"{block}.mlp.c_proj.weight", (dim, hidden)
            yield from attention_shapes(f"{block}.attn", dim, index, REDUCTIONS[stage])
    yield from pair("norm", (widths[-1],))
    yield from pair("head", (1000, widths[-1]))


def attention_shapes(prefix, dim, index, reduction):
    yield from pair(f"{prefix}.proj", (dim, dim))
    if index % 2 == 0:
        yield from pair(f"{prefix}.qkv", (3 * dim, dim))
        return
    yield from pair(f"{prefix}.q", (dim, dim))
    yield from pair(f"{prefix}.kv", (2 * dim, dim))
    if reduction > 1:
        yield from conv(f"{prefix}.sr", dim, dim, reduction)
        yield from pair(f"{prefix}.norm", (dim,))


def logits(state, images, name, **quirks):
    """(B, 3, H, W) -> (B, 1000); the final norm is applied twice."""
    pooled = norm(stages(state, images, name, **quirks)[-1], state, "norm").mean((1, 2))
    return linear(norm(pooled, state, "norm"), state, "head")


def stages(state, images, name, **quirks):
    """(B, 3, H, W) -> four maps (B, h, w, C)."""
    x, maps = images.permute(0, 2, 3, 1), []
    for stage, depth in enumerate(DEPTHS[name]):
        x = patches(x, state, f"patch_embeds.{stage}.proj")
        x = norm(x, state, f"patch_embeds.{stage}.norm")
        for index in range(depth):
            block = f"blocks.{stage}.{index}"
            y = norm(x, state, f"{block}.norm1")
            if index % 2 == 0:
                y = local_attention(y, state, f"{block}.attn")
            else:
                y = global_attention(y, state, f"{block}.attn", REDUCTIONS[stage], **quirks)
            x = x + state[f"{block}.gamma_1"] * y
            y = norm(x, state, f"{block}.norm2")
            y = F.silu(y @ state[f"{block}.mlp.c_fc1.weight"].T) * (
                y @ state[f"{block}.mlp.c_fc2.weight"].T
            )
            x = x + state[f"{block}.gamma_2"] * (y @ state[f"{block}.mlp.c_proj.weight"].T)
        maps.append(x)
    return maps


def patches(x, state, name):
    """A strided convolution without overlap, one patch at a time; zeros beyond the map."""
    weight = state[f"{name}.weight"]
    side = weight.shape[-1]
    rows, columns = (-(-length // side) for length in x.shape[1:3])
    out = x.new_zeros(len(x), rows, columns, len(weight))
    for i in range(rows):
        for j in range(columns):
            patch = x[:, i * side : (i + 1) * side, j * side : (j + 1) * side]
            part = weight[:, :, : patch.shape[1], : patch.shape[2]]
            out[:, i, j] = torch.einsum("bhwd,cdhw->bc", patch, part) + state[f"{name}.bias"]
    return out


def local_attention(x, state, prefix):
    """Windows of 7x7 tokens, those beyond the map with zeros, one window at a time."""
    height, width, dim = x.shape[1:]
    out = torch.zeros_like(x)
    grid = [(n % 7, n // 7) for n in range(49)]
    for top in range(0, height, 7):
        for left in range(0, width, 7):
            window = x.new_zeros(len(x), 7, 7, dim)
            part = x[:, top : top + 7, left : left + 7]
            window[:, : part.shape[1], : part.shape[2]] = part
            q, k, v = linear(window.flatten(1, 2), state, f"{prefix}.qkv").chunk(3, -1)
            mixed = attention(turned(q, grid), turned(k, grid), v).reshape(window.shape)
            out[:, top : top + 7, left : left + 7] = mixed[:, : part.shape[1], : part.shape[2]]
    return linear(out, state, f"{prefix}.proj")


def global_attention(x, state, prefix, s, *, regular_keys=False, auto_scale=False):
    """All tokens to the reduced map's."""
    height, width, dim = x.shape[1:]
    reduced = x
    if s > 1:
        reduced = norm(patches(x, state, f"{prefix}.sr"), state, f"{prefix}.norm")
    row = reduced.shape[2] if regular_keys else width
    q = linear(x.flatten(1, 2), state, f"{prefix}.q")
    k, v = linear(reduced.flatten(1, 2), state, f"{prefix}.kv").chunk(2, -1)
    scale = 14 / height if auto_scale else 1
    offset = 1 - 1 / s
    queries = [(scale * (n % width), scale * (n // width)) for n in range(q.shape[1])]
    keys = [
        (scale * (offset + s * (n % row)), scale * (offset + s * (n // row)))
        for n in range(k.shape[1])
    ]
    mixed = attention(turned(q, queries), turned(k, keys), v)
    return linear(mixed.reshape(-1, height, width, dim), state, f"{prefix}.proj")


def turned(x, places):
    """(B, N, C): every second complex number of a head turns by x f_m, the others by y f_m."""
    numbers = torch.view_as_complex(x.unflatten(-1, (-1, 16, 2)).contiguous())
    angles = torch.tensor(
        [[place[p % 2] * 10000 ** (-4 * (p // 2) / 32) for p in range(16)] for place in places],
        dtype=x.dtype,
    )
    turns = torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.view_as_real(numbers * turns).flatten(2)


def attention(q, k, v):
    """(B, N, C), heads of 32 channels."""
    q, k, v = (x.unflatten(-1, (-1, 32)) for x in (q, k, v))
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k) / 32**0.5
    return torch.einsum("bhnm,bmhd->bnhd", scores.softmax(-1), v).flatten(2)
