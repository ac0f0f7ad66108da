"""CycleMLP under its authors' names, written plainly: every channel looks up its own token.

Source: Chen et al., ICLR 2022, and the names and shapes of the released checkpoints.
"""

import torch
import torch.nn.functional as F

WIDTHS = (64, 128, 320, 512)
DEPTHS = {"cyclemlp_b1": (2, 2, 4, 2), "cyclemlp_b2": (2, 3, 10, 3)}


def shapes(name):
    """Names and shapes of a released checkpoint, in its order."""
    yield from conv("patch_embed.proj", 3, 64, 7)
    for stage, (dim, depth) in enumerate(zip(WIDTHS, DEPTHS[name], strict=True)):
        if stage:
            yield from conv(f"network.{2 * stage - 1}.proj", WIDTHS[stage - 1], dim, 3)
        for index in range(depth):
            block = f"network.{2 * stage}.{index}"
            yield from pair(f"{block}.norm1", (dim,))
            yield f"{block}.attn.mlp_c.weight", (dim, dim)
            for layer in ("sfc_h", "sfc_w"):
                yield from conv(f"{block}.attn.{layer}", dim, dim, 1)
                yield f"{block}.attn.{layer}.offset", (1, 2 * dim, 1, 1)
            yield from pair(f"{block}.attn.reweight.fc1", (dim // 4, dim))
            yield from pair(f"{block}.attn.reweight.fc2", (3 * dim, dim // 4))
            yield from pair(f"{block}.attn.proj", (dim, dim))
            yield from pair(f"{block}.norm2", (dim,))
            yield from pair(f"{block}.mlp.fc1", (4 * dim, dim))
            yield from pair(f"{block}.mlp.fc2", (dim, 4 * dim))
    yield from pair("norm", (WIDTHS[-1],))
    yield from pair("head", (1000, WIDTHS[-1]))


def pair(name, shape):
    """A weight and its bias."""
    yield f"{name}.weight", shape
    yield f"{name}.bias", shape[:1]


def conv(name, channels, dim, kernel):
    return pair(name, (dim, channels, kernel, kernel))


def logits(state, images, name):
    """(B, 3, H, W) -> (B, 1000)."""
    return linear(norm(stages(state, images, name)[-1], state, "norm").mean((1, 2)), state, "head")


def stages(state, images, name):
    """(B, 3, H, W) -> four maps (B, h, w, C)."""
    x, maps = images, []
    for stage, depth in enumerate(DEPTHS[name]):
        prefix = f"network.{2 * stage - 1}.proj" if stage else "patch_embed.proj"
        stride, padding = (2, 1) if stage else (4, 2)
        weight, bias = state[f"{prefix}.weight"], state[f"{prefix}.bias"]
        y = F.conv2d(x, weight, bias, stride, padding).permute(0, 2, 3, 1)
        for index in range(depth):
            block = f"network.{2 * stage}.{index}"
            y = y + token_mixing(norm(y, state, f"{block}.norm1"), state, f"{block}.attn")
            hidden = F.gelu(linear(norm(y, state, f"{block}.norm2"), state, f"{block}.mlp.fc1"))
            y = y + linear(hidden, state, f"{block}.mlp.fc2")
        maps.append(y)
        x = y.permute(0, 3, 1, 2)
    return maps


def token_mixing(x, state, prefix):
    """(B, H, W, C) -> the same."""
    across = linear(neighbours(x, 2), state, f"{prefix}.sfc_h")
    down = linear(neighbours(x, 1), state, f"{prefix}.sfc_w")
    own = x @ state[f"{prefix}.mlp_c.weight"].T
    merged = merge([across, down, own], state, f"{prefix}.reweight")
    return linear(merged, state, f"{prefix}.proj")


def neighbours(x, axis):
    """Channel i of the token (i + 1) mod 3 - 1 places on along an axis, 0 beyond the map."""
    length, out = x.shape[axis], []
    for channel in range(x.shape[-1]):
        offset = (channel + 1) % 3 - 1
        tokens = [
            x.select(axis, t + offset)[..., channel]
            if 0 <= t + offset < length
            else torch.zeros_like(x.select(axis, t)[..., channel])
            for t in range(length)
        ]
        out.append(torch.stack(tokens, axis))
    return torch.stack(out, -1)


def merge(branches, state, prefix):
    """Shares of three branches (B, H, W, C) from the mean of their sum."""
    hidden = F.gelu(linear(sum(branches).mean((1, 2)), state, f"{prefix}.fc1"))
    shares = linear(hidden, state, f"{prefix}.fc2").unflatten(1, (-1, 3)).softmax(2)
    return sum(x * shares[:, None, None, :, k] for k, x in enumerate(branches))


def norm(x, state, name):
    """LayerNorm over the last axis."""
    centred = x - x.mean(-1, keepdim=True)
    scale = (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return centred / scale * state[f"{name}.weight"] + state[f"{name}.bias"]


def linear(x, state, name):
    """W x + b over the last axis; 1x1 convolutions are linear layers."""
    return x @ state[f"{name}.weight"].flatten(1).T + state[f"{name}.bias"]
