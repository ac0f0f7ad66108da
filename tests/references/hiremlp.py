"""Hire-MLP under its authors' names, written plainly: regions are lists of indices.

Source: Guo et al., CVPR 2022, and the names and shapes of the released checkpoints.
"""

import torch
import torch.nn.functional as F

from tests.references.cyclemlp import WIDTHS, conv, linear, merge, pair

DEPTHS = {"hiremlp_t": (2, 2, 4, 2), "hiremlp_s": (3, 4, 10, 3)}
REGIONS = (4, 3, 3, 2)
SHIFTS = ((0, 2), (0, 2), (0, 1, 2), (0, 1))  # of successive blocks, over and over


def shapes(name):
    """Names and shapes of a released checkpoint, in its order."""
    yield from conv("patch_embed.proj", 3, 64, 7)
    yield from batch_norm("patch_embed.norm", 64)
    for stage, (dim, depth) in enumerate(zip(WIDTHS, DEPTHS[name], strict=True)):
        if stage:
            transition = f"network.{2 * stage - 1}"
            yield from conv(f"{transition}.proj", WIDTHS[stage - 1], dim, 3)
            yield from batch_norm(f"{transition}.norm", dim)
        wide = REGIONS[stage] * dim
        for index in range(depth):
            block = f"network.{2 * stage}.{index}"
            yield from batch_norm(f"{block}.norm1", dim)
            for axis in "hw":
                layer = f"{block}.attn.mlp_{axis}"
                yield f"{layer}1.weight", (dim // 2, wide, 1, 1)
                yield from batch_norm(f"{layer}1_norm", dim // 2)
                yield from conv(f"{layer}2", dim // 2, wide, 1)
            yield from conv(f"{block}.attn.mlp_c", dim, dim, 1)
            yield from conv(f"{block}.attn.reweight.fc1", dim, dim // 4, 1)
            yield from conv(f"{block}.attn.reweight.fc2", dim // 4, 3 * dim, 1)
            yield from conv(f"{block}.attn.proj", dim, dim, 1)
            yield from batch_norm(f"{block}.norm2", dim)
            yield from conv(f"{block}.mlp.fc1", dim, 4 * dim, 1)
            yield from conv(f"{block}.mlp.fc2", 4 * dim, dim, 1)
    yield from batch_norm("norm", WIDTHS[-1])
    yield from pair("head", (1000, WIDTHS[-1]))


def batch_norm(name, dim):
    yield from pair(name, (dim,))
    yield f"{name}.running_mean", (dim,)
    yield f"{name}.running_var", (dim,)
    yield f"{name}.num_batches_tracked", ()


def logits(state, images, name):
    """(B, 3, H, W) -> (B, 1000)."""
    return linear(norm(stages(state, images, name)[-1], state, "norm").mean((1, 2)), state, "head")


def stages(state, images, name):
    """(B, 3, H, W) -> four maps (B, h, w, C)."""
    x, maps = images, []
    for stage, depth in enumerate(DEPTHS[name]):
        prefix = f"network.{2 * stage - 1}" if stage else "patch_embed"
        stride, padding = (2, 1) if stage else (4, 2)
        weight, bias = state[f"{prefix}.proj.weight"], state[f"{prefix}.proj.bias"]
        y = F.conv2d(x, weight, bias, stride, padding).permute(0, 2, 3, 1)
        y = norm(y, state, f"{prefix}.norm").clamp(min=0)
        for index in range(depth):
            block = f"network.{2 * stage}.{index}"
            shift = SHIFTS[stage][index % len(SHIFTS[stage])]
            mixed = norm(y, state, f"{block}.norm1")
            y = y + token_mixing(mixed, state, f"{block}.attn", REGIONS[stage], shift)
            hidden = F.gelu(linear(norm(y, state, f"{block}.norm2"), state, f"{block}.mlp.fc1"))
            y = y + linear(hidden, state, f"{block}.mlp.fc2")
        maps.append(y)
        x = y.permute(0, 3, 1, 2)
    return maps


def token_mixing(x, state, prefix, region, shift):
    """(B, H, W, C) -> the same."""
    down = regions(x, state, f"{prefix}.mlp_h", region, shift)
    across = regions(x.transpose(1, 2), state, f"{prefix}.mlp_w", region, shift).transpose(1, 2)
    own = linear(x, state, f"{prefix}.mlp_c")
    return linear(merge([down, across, own], state, f"{prefix}.reweight"), state, f"{prefix}.proj")


def regions(x, state, prefix, region, shift):
    """Each region of rows as one long vector, channel by channel; rows count from -shift on."""
    length, channels = x.shape[1], x.shape[-1]
    rows = [(i - shift) % length for i in range(-(-length // region) * region)]
    out = [None] * length
    for first in range(0, len(rows), region):
        members = rows[first : first + region]
        long = torch.stack([x[:, row] for row in members], -1).flatten(-2)  # c * region + row
        narrow = (long @ state[f"{prefix}1.weight"].flatten(1).T)[:, None]
        narrow = norm(narrow, state, f"{prefix}1_norm").clamp(min=0)[:, 0]
        long = linear(narrow, state, f"{prefix}2").unflatten(-1, (channels, region))
        for place, row in enumerate(members):
            if first + place < length:  # what fills the last region is not read
                out[row] = long[..., place]
    return torch.stack(out, 1)


def norm(x, state, name):
    """BatchNorm in evaluation over the last axis."""
    centred = x - state[f"{name}.running_mean"]
    scale = (state[f"{name}.running_var"] + 1e-5).sqrt()
    return centred / scale * state[f"{name}.weight"] + state[f"{name}.bias"]
