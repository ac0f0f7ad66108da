"""LVT written plainly from its equations, over tensors under the authors' names, NCHW throughout.

Windows are unfolded and folded, attention is softmax of products; nothing here is shared with the
package.

Source: Yang et al., CVPR 2022; Touvron et al., ICCV 2021 (class attention).
"""

import torch
import torch.nn.functional as F

DIMS = (64, 64, 160, 256)
REDUCTIONS = (None, 4, 2, 1)


class Network:
    """Tensors of a checkpoint, the recursion count, and what is computed from them."""

    def __init__(self, tensors, steps):
        self.t, self.steps = tensors, steps

    def linear(self, x, name):
        """(..., D) -> (..., C)."""
        y = x @ self.t[f"{name}.weight"].mT
        return y + self.t[f"{name}.bias"] if f"{name}.bias" in self.t else y

    def norm(self, x, name):
        """LayerNorm over the last axis."""
        mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, correction=0)
        normal = (x - mean) / (var + 1e-5).sqrt()
        return normal * self.t[f"{name}.weight"] + self.t[f"{name}.bias"]

    def conv(self, x, name, **options):
        return F.conv2d(x, self.t[f"{name}.weight"], self.t.get(f"{name}.bias"), **options)

    def at_tokens(self, function, x, *args):
        """Apply a function of (..., C) to a map (B, C, H, W)."""
        return function(x.movedim(1, -1), *args).movedim(-1, 1)

    def csa(self, x, name):
        batch, dim, height, width = x.shape
        heads = dim // 32
        means = F.avg_pool2d(x, 2, ceil_mode=True)
        rows, columns = means.shape[2:]
        logits = self.linear(means.flatten(2).mT, f"{name}.attn")
        weights = (logits.reshape(batch, rows * columns, heads, 9, 9) * 32**-0.5).softmax(-1)
        windows = F.unfold(x, 3, padding=1, stride=2).reshape(batch, dim, 9, rows * columns)
        matrices = self.t[f"{name}.weight.weight"].reshape(9, dim, dim)
        values = torch.einsum("koc,bckl->blko", matrices, windows)
        values = values.reshape(batch, rows * columns, 9, heads, 32)
        mixed = torch.einsum("blhpk,blkhd->bhdpl", weights, values).reshape(batch, dim * 9, -1)
        total = F.fold(mixed, (height, width), 3, padding=1, stride=2)
        return self.at_tokens(self.linear, total, f"{name}.proj")

    def heads(self, x):
        """(B, N, C) -> (B, n, N, 32)."""
        return x.reshape(*x.shape[:2], -1, 32).transpose(1, 2)

    def attention(self, q, k, v):
        weights = (self.heads(q) @ self.heads(k).mT / 32**0.5).softmax(-1)
        return (weights @ self.heads(v)).transpose(1, 2).flatten(2)

    def asa(self, x, name, reduction):
        dim, size = x.shape[1], x.shape[2:]
        q, total = self.at_tokens(self.linear, x, f"{name}.q"), 0
        for dilation in (1, 3, 5):
            scale = self.conv(q, f"{name}.ds", padding=dilation, dilation=dilation, groups=dim)
            total = total + scale * scale.sigmoid()
        y = x
        if reduction > 1:
            y = self.conv(x, f"{name}.sr", stride=reduction)
            y = self.at_tokens(self.norm, y, f"{name}.norm")
        kv = self.linear(y.flatten(2).mT, f"{name}.kv")
        mixed = self.attention(total.flatten(2).mT, kv[..., :dim], kv[..., dim:])
        return self.linear(mixed, f"{name}.proj").mT.unflatten(2, size)

    def rasa(self, x, name, reduction):
        if self.steps == 1:
            return self.asa(x, name, reduction)
        outs, accumulated = [], x
        for _ in range(self.steps):
            accumulated = accumulated + (outs[-1] if outs else 0)
            out = self.asa(accumulated, name, reduction)
            outs.append(out * out.sigmoid())
        return outs[-1]

    def ffn(self, x, name):
        return self.linear(F.gelu(self.linear(x, f"{name}.fc1")), f"{name}.fc2")

    def conv_ffn(self, x, name):
        hidden = self.conv(x, f"{name}.fc1")
        hidden = self.conv(hidden, f"{name}.depconv", padding=1, groups=hidden.shape[1])
        return self.conv(F.gelu(hidden), f"{name}.fc2")

    def block(self, x, name, stage):
        y = self.at_tokens(self.norm, x, f"{name}.norm1")
        if stage == 0:
            x = x + self.csa(y, f"{name}.attn")
        else:
            x = x + self.rasa(y, f"{name}.attn", REDUCTIONS[stage])
        y = self.at_tokens(self.norm, x, f"{name}.norm2")
        if stage == 0:
            return x + self.at_tokens(self.ffn, y, f"{name}.mlp")
        return x + self.conv_ffn(y, f"{name}.mlp")

    def maps(self, images, box=None):
        """The four stage outputs; ``box`` exchanges rows and columns of the first with the flip."""
        x, maps = images, []
        for stage in range(4):
            name = f"backbone.{stage}"
            stride, padding = (4, 3) if stage == 0 else (2, 1)
            x = self.conv(x, f"{name}.0.proj", stride=stride, padding=padding)
            x = self.at_tokens(self.norm, x, f"{name}.0.norm")
            if box is not None and stage == 0:
                x = exchange(x, [8 * side for side in box])
            for index in range(2):
                x = self.block(x, f"{name}.1.{index}", stage)
            maps.append(x)
        return maps

    def class_block(self, token, tokens, name):
        z = self.norm(torch.cat([token, tokens], dim=1), f"{name}.norm1")
        q = self.linear(z[:, :1], f"{name}.attn.q")
        kv = self.linear(z, f"{name}.attn.kv")
        dim = kv.shape[-1] // 2
        mixed = self.attention(q, kv[..., :dim], kv[..., dim:])
        token = token + self.linear(mixed, f"{name}.attn.proj")
        return token + self.ffn(self.norm(token, f"{name}.norm2"), f"{name}.mlp")

    def heads_of_class_and_tokens(self, images, box=None):
        """Logits of the class token (B, K), and of all others (B, K, h, w) in their own image."""
        x = self.maps(images, box)[-1]
        tokens, token = x.flatten(2).mT, self.t["cls_token"].expand(len(x), -1, -1)
        for index in range(2):
            token = self.class_block(token, tokens, f"post_network.{index}")
        aux = self.linear(self.norm(tokens, "norm"), "aux_head").mT.unflatten(2, x.shape[2:])
        if box is not None:
            aux = exchange(aux, box)
        return self.linear(self.norm(token[:, 0], "norm"), "head"), aux

    def logits(self, images):
        token, tokens = self.heads_of_class_and_tokens(images)
        return token + 0.5 * tokens.amax((2, 3))

    def plain_logits(self, images):
        tokens = self.maps(images)[-1].flatten(2).mT
        return self.linear(self.norm(tokens, "norm").mean(1), "head")


def exchange(x, box):
    """A box (top, bottom, left, right) of (B, C, H, W) from the image mirrored in the batch."""
    rows, columns = (torch.arange(side) for side in x.shape[2:])
    inside = (
        ((rows >= box[0]) & (rows < box[1]))[:, None] & (columns >= box[2]) & (columns < box[3])
    )
    return torch.where(inside, x.flip(0), x)


def shapes(plain=False):
    """Names and shapes of the released checkpoints' tensors, which all recursion counts share."""
    found = {}

    def layer(name, *weight, bias=True):
        found[f"{name}.weight"] = weight
        if bias:
            found[f"{name}.bias"] = weight[:1]

    def attention(name, dim):
        layer(f"{name}.q", dim, dim, bias=False)
        layer(f"{name}.kv", 2 * dim, dim, bias=False)

    for stage, (dim, reduction) in enumerate(zip(DIMS, REDUCTIONS, strict=True)):
        side, before = (3, DIMS[stage - 1]) if stage else (7, 3)
        layer(f"backbone.{stage}.0.proj", dim, before, side, side)
        layer(f"backbone.{stage}.0.norm", dim)
        hidden, tail = dim * (8 if stage == 1 else 4), (1, 1) if stage else ()
        for index in range(2):
            name = f"backbone.{stage}.1.{index}"
            layer(f"{name}.norm1", dim)
            layer(f"{name}.norm2", dim)
            layer(f"{name}.attn.proj", dim, dim)
            layer(f"{name}.mlp.fc1", hidden, dim, *tail)
            layer(f"{name}.mlp.fc2", dim, hidden, *tail)
            if stage == 0:
                layer(f"{name}.attn.attn", dim // 32 * 81, dim)
                layer(f"{name}.attn.weight", 9 * dim, dim, 1, 1, bias=False)
                continue
            attention(f"{name}.attn", dim)
            layer(f"{name}.attn.ds", dim, 1, 3, 3, bias=False)
            layer(f"{name}.mlp.depconv", hidden, 1, 3, 3)
            if reduction > 1:
                layer(f"{name}.attn.sr", dim, dim, reduction, reduction)
                layer(f"{name}.attn.norm", dim)
    layer("norm", dim)
    layer("head", 1000, dim)
    if not plain:
        found["cls_token"] = (1, 1, dim)
        layer("aux_head", 1000, dim)
        for index in range(2):
            name = f"post_network.{index}"
            layer(f"{name}.norm1", dim)
            layer(f"{name}.norm2", dim)
            attention(f"{name}.attn", dim)
            layer(f"{name}.attn.proj", dim, dim)
            layer(f"{name}.mlp.fc1", 4 * dim, dim)
            layer(f"{name}.mlp.fc2", dim, 4 * dim)
    return found
