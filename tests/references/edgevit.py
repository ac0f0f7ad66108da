"""EdgeViT-XXS written plainly from its equations, over tensors under the authors' names, NCHW.

Attention gathers its tokens by index and spreads each result by a loop over offsets; nothing here
is shared with the package.

Source: Pan et al., ECCV 2022.
"""

import torch
import torch.nn.functional as F

DIMS = (36, 72, 144, 288)
DEPTHS, SAMPLING, HEADS = (1, 1, 3, 2), (4, 2, 2, 1), (1, 2, 4, 8)


class Network:
    """Tensors of a checkpoint, and what is computed from them."""

    def __init__(self, tensors):
        self.t = tensors

    def conv(self, x, name, **options):
        return F.conv2d(x, self.t[f"{name}.weight"], self.t[f"{name}.bias"], **options)

    def depthwise(self, x, name):
        side = self.t[f"{name}.weight"].shape[-1]
        return self.conv(x, name, padding=side // 2, groups=x.shape[1])

    def linear(self, x, name):
        return x @ self.t[f"{name}.weight"].mT + self.t[f"{name}.bias"]

    def scaled(self, normal, name):
        """A normalised (B, C, H, W) times the weight, plus the bias."""
        weight, bias = self.t[f"{name}.weight"], self.t[f"{name}.bias"]
        return normal * weight[:, None, None] + bias[:, None, None]

    def layer_norm(self, x, name, eps=1e-5):
        mean, var = x.mean(1, keepdim=True), x.var(1, keepdim=True, correction=0)
        return self.scaled((x - mean) / (var + eps).sqrt(), name)

    def batch_norm(self, x, name):
        mean, var = self.t[f"{name}.running_mean"], self.t[f"{name}.running_var"]
        return self.scaled((x - mean[:, None, None]) / (var + 1e-5).sqrt()[:, None, None], name)

    def local(self, x, name):
        x = x + self.depthwise(x, f"{name}.pos_embed")
        y = self.conv(self.batch_norm(x, f"{name}.norm1"), f"{name}.conv1")
        x = x + self.conv(self.depthwise(y, f"{name}.attn"), f"{name}.conv2")
        y = self.conv(self.batch_norm(x, f"{name}.norm2"), f"{name}.mlp.fc1")
        return x + self.conv(F.gelu(y), f"{name}.mlp.fc2")

    def attention(self, x, name, stage):
        batch, dim, height, width = x.shape
        step = SAMPLING[stage]
        rows, columns = torch.arange(0, height, step), torch.arange(0, width, step)
        tokens = x[:, :, rows][:, :, :, columns].flatten(2).mT
        qkv = self.linear(tokens, f"{name}.qkv").reshape(batch, -1, 3, HEADS[stage], 36)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = ((q @ k.mT * 36**-0.5).softmax(-1) @ v).transpose(1, 2).flatten(2).mT
        y = y.unflatten(2, (len(rows), len(columns)))
        if step > 1:
            weight, bias = self.t[f"{name}.LocalProp.weight"], self.t[f"{name}.LocalProp.bias"]
            spread = x.new_zeros(batch, dim, len(rows) * step, len(columns) * step)
            for i in range(step):
                for j in range(step):
                    spread[:, :, i::step, j::step] = y * weight[:, 0, i, j, None, None]
            spread = (spread + bias[:, None, None])[:, :, :height, :width]
            y = self.layer_norm(spread, f"{name}.norm")
        return self.linear(y.movedim(1, -1), f"{name}.proj").movedim(-1, 1)

    def sparse(self, x, name, stage):
        x = x + self.depthwise(x, f"{name}.pos_embed")
        y = self.layer_norm(x, f"{name}.norm1", eps=1e-6)
        x = x + self.attention(y, f"{name}.attn", stage)
        y = self.layer_norm(x, f"{name}.norm2", eps=1e-6).movedim(1, -1)
        y = self.linear(F.gelu(self.linear(y, f"{name}.mlp.fc1")), f"{name}.mlp.fc2")
        return x + y.movedim(-1, 1)

    def maps(self, images):
        """The four stage outputs; what no whole patch covers is filled up with zeros."""
        x, maps = images, []
        for stage, depth in enumerate(DEPTHS):
            name, side = f"patch_embed{stage + 1}", 2 if stage else 4
            x = F.pad(x, (0, -x.shape[3] % side, 0, -x.shape[2] % side))
            x = self.conv(x, f"{name}.proj", stride=side)
            x = self.layer_norm(x, f"{name}.norm")
            for index in range(depth):
                block = f"blocks{stage + 1}.{index}"
                if SAMPLING[stage] > 1:
                    x = self.local(x, f"{block}.LocalAgg")
                x = self.sparse(x, f"{block}.SelfAttn", stage)
            maps.append(x)
        return maps

    def logits(self, images):
        return self.linear(self.batch_norm(self.maps(images)[-1], "norm").mean((2, 3)), "head")


def shapes():
    """Names and shapes of the released checkpoint's tensors."""
    found = {}

    def layer(name, *weight, bias=True):
        found[f"{name}.weight"] = weight
        if bias:
            found[f"{name}.bias"] = weight[:1]

    def batch_norm(name, dim):
        layer(name, dim)
        found.update({f"{name}.running_mean": (dim,), f"{name}.running_var": (dim,)})
        found[f"{name}.num_batches_tracked"] = ()

    def half(name, dim, norm, *tail):
        layer(f"{name}.pos_embed", dim, 1, 3, 3)
        for index in (1, 2):
            norm(f"{name}.norm{index}", dim)
        layer(f"{name}.mlp.fc1", 4 * dim, dim, *tail)
        layer(f"{name}.mlp.fc2", dim, 4 * dim, *tail)

    for stage, (dim, depth, step) in enumerate(zip(DIMS, DEPTHS, SAMPLING, strict=True)):
        side, before = (2, DIMS[stage - 1]) if stage else (4, 3)
        layer(f"patch_embed{stage + 1}.norm", dim)
        layer(f"patch_embed{stage + 1}.proj", dim, before, side, side)
        for index in range(depth):
            name = f"blocks{stage + 1}.{index}"
            if step > 1:
                half(f"{name}.LocalAgg", dim, batch_norm, 1, 1)
                layer(f"{name}.LocalAgg.conv1", dim, dim, 1, 1)
                layer(f"{name}.LocalAgg.conv2", dim, dim, 1, 1)
                layer(f"{name}.LocalAgg.attn", dim, 1, 5, 5)
                layer(f"{name}.SelfAttn.attn.LocalProp", dim, 1, step, step)
                layer(f"{name}.SelfAttn.attn.norm", dim)
            half(f"{name}.SelfAttn", dim, layer)
            layer(f"{name}.SelfAttn.attn.qkv", 3 * dim, dim)
            layer(f"{name}.SelfAttn.attn.proj", dim, dim)
    batch_norm("norm", DIMS[-1])
    layer("head", 1000, DIMS[-1])
    return found
