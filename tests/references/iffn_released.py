"""DeiT with IFFN as its authors released it, from their names of tensors to logits.

Written from what https://github.com/AMD-AIG-AIMA/AMD_IFFN computes (November 2024): the branches
side by side, layer norm, t + GELU(BN(DW(t))), W2, layer norm; a DeiT without class token, whose
mean over all tokens is classified. Layer norms have eps 1e-6 in DeiT and 1e-5 in the mixer.
Axes: B images, n tokens of a square map, C channels.
"""

import math

import torch
import torch.nn.functional as F

from tests.references.checkpoints import pair

DEPTH, PATCH = 12, 16


def mixer_shapes(dim, side, name=""):
    """Of the mixer at C channels, with a depthwise convolution of this side."""
    shapes = {}
    for part in ("act1", "act2"):
        for move in ("move1", "move2"):
            for what in ("scale", "bias"):
                shapes[f"{name}{part}.{move}.{what}"] = (1, 1, 2 * dim)
    shapes |= pair(f"{name}conv1", 2 * dim, dim) | pair(f"{name}conv2", dim, 4 * dim)
    shapes |= pair(f"{name}ln1", 4 * dim) | pair(f"{name}ln2", dim) | pair(f"{name}ln", 4 * dim)
    shapes |= {f"{name}ln.running_{what}": (4 * dim,) for what in ("mean", "var")}
    shapes |= {f"{name}ln.num_batches_tracked": ()}
    return shapes | pair(f"{name}conv{side}x{side}_dw", 4 * dim, 1, side, side)


def shapes(dim, side, positions, num_classes=1000):
    """Of a released checkpoint."""
    named = {"pos_embed": (1, positions, dim)} | pair("patch_embed.proj", dim, 3, PATCH, PATCH)
    for index in range(DEPTH):
        name = f"blocks.{index}."
        named |= pair(f"{name}norm1", dim) | pair(f"{name}norm2", dim)
        named |= pair(f"{name}attn.qkv", 3 * dim, dim) | pair(f"{name}attn.proj", dim, dim)
        named |= mixer_shapes(dim, side, f"{name}mlp.")
    return named | pair("norm", dim) | pair("head", num_classes, dim)


class Network:
    """Callable: images (B, 3, H, W) -> logits (B, classes)."""

    def __init__(self, tensors, heads=0, training=False):
        self.t, self.heads, self.training = tensors, heads, training

    def linear(self, x, name):
        return x @ self.t[f"{name}.weight"].T + self.t[f"{name}.bias"]

    def layer_norm(self, x, name, eps):
        centred = x - x.mean(-1, keepdim=True)
        deviation = (centred.square().mean(-1, keepdim=True) + eps).sqrt()
        return centred / deviation * self.t[f"{name}.weight"] + self.t[f"{name}.bias"]

    def batch_norm(self, x, name):
        """(B, C, H, W)."""
        mean, var = self.t[f"{name}.running_mean"], self.t[f"{name}.running_var"]
        if self.training:
            of_batch = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
            unbiased = x.var((0, 2, 3))
            self.t[f"{name}.running_mean"] = 0.9 * mean + 0.1 * of_batch[0].detach()
            self.t[f"{name}.running_var"] = 0.9 * var + 0.1 * unbiased.detach()
            mean, var = of_batch
        mean, var, weight, bias = (
            v[:, None, None] for v in (mean, var, self.t[f"{name}.weight"], self.t[f"{name}.bias"])
        )
        return (x - mean) / (var + 1e-5).sqrt() * weight + bias

    def activation(self, z, name):
        """Scale, shift, GELU, scale, shift."""
        y = z * self.t[f"{name}.move1.scale"] + self.t[f"{name}.move1.bias"]
        y = y * 0.5 * (1 + torch.erf(y / 2**0.5))
        return y * self.t[f"{name}.move2.scale"] + self.t[f"{name}.move2.bias"]

    def mixer(self, x, name=""):
        """(B, n, C) -> (B, n, C)."""
        z = self.linear(x, f"{name}conv1")
        t = torch.cat([self.activation(z, f"{name}{part}") for part in ("act1", "act2")], dim=2)
        t = self.layer_norm(t, f"{name}ln1", 1e-5)
        height = math.isqrt(t.shape[1])
        t = t.mT.unflatten(2, (height, height))
        side = next(s for s in (3, 5) if f"{name}conv{s}x{s}_dw.weight" in self.t)
        kernel, bias = (self.t[f"{name}conv{side}x{side}_dw.{w}"] for w in ("weight", "bias"))
        u = F.conv2d(t, kernel, bias, padding=side // 2, groups=len(kernel))
        u = self.batch_norm(u, f"{name}ln")
        t = t + u * 0.5 * (1 + torch.erf(u / 2**0.5))
        return self.layer_norm(self.linear(t.flatten(2).mT, f"{name}conv2"), f"{name}ln2", 1e-5)

    def attention(self, x, name):
        """(B, n, C) -> (B, n, C)."""
        q, k, v = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in self.linear(x, f"{name}.qkv").chunk(3, dim=2)
        )
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return self.linear((weights @ v).transpose(1, 2).flatten(2), f"{name}.proj")

    def __call__(self, images):
        kernel, bias = self.t["patch_embed.proj.weight"], self.t["patch_embed.proj.bias"]
        x = F.conv2d(images, kernel, bias, stride=PATCH).flatten(2).mT + self.t["pos_embed"]
        for index in range(DEPTH):
            name = f"blocks.{index}."
            x = x + self.attention(self.layer_norm(x, f"{name}norm1", 1e-6), f"{name}attn")
            x = x + self.mixer(self.layer_norm(x, f"{name}norm2", 1e-6), f"{name}mlp.")
        return self.linear(self.layer_norm(x, "norm", 1e-6).mean(1), "head")
