"""SBM written out from its equations with explicit matrices and loops; slow, and nothing shared.

Source: Peng et al., CVPR 2025, Eq. 2 (the mixer), Sec. 4.1 (block and network). Resampling of the
spatial factors is ours; its weights are those of an antialiased cubic or linear filter.
Axes: B images, H W map, n = H W tokens, d channels, m rank.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.references.afbo import depthwise


def axis_weights(old: int, new: int, mode: str) -> Tensor:
    """(new, old): every new position is a weighted mean of old ones, wider when it shrinks."""
    ratio = old / new
    stretch = max(ratio, 1.0)
    reach = {"bicubic": 2.0, "bilinear": 1.0}[mode] * stretch
    weights = torch.zeros(new, old, dtype=torch.float64)
    for i in range(new):
        centre = ratio * (i + 0.5)
        first, last = int(max(centre - reach + 0.5, 0)), int(min(centre + reach + 0.5, old))
        for j in range(first, last):
            distance = abs(j + 0.5 - centre) / stretch
            if mode == "bilinear":
                value = max(1 - distance, 0.0)
            elif distance < 1:
                value = 1.5 * distance**3 - 2.5 * distance**2 + 1
            elif distance < 2:
                value = -0.5 * distance**3 + 2.5 * distance**2 - 4 * distance + 2
            else:
                value = 0.0
            weights[i, j] = value
        weights[i] /= weights[i].sum()
    return weights


def resized(table: Tensor, size: tuple[int, int], mode: str) -> Tensor:
    """(m, gh, gw) -> (m, H, W)."""
    if tuple(table.shape[1:]) == size:
        return table
    rows = axis_weights(table.shape[1], size[0], mode)
    columns = axis_weights(table.shape[2], size[1], mode)
    return torch.stack([rows @ image @ columns.T for image in table])


def spatial_matrix(read: Tensor, write: Tensor, size: tuple[int, int], mode: str) -> Tensor:
    """W_s (n, n) of a map: entry (i, j) says what token i takes from token j."""
    scale = read.shape[1] * read.shape[2] / (size[0] * size[1])
    read, write = (resized(table, size, mode) for table in (read, write))
    matrix = torch.zeros(size[0] * size[1], size[0] * size[1], dtype=read.dtype)
    for k in range(len(read)):
        matrix = matrix + torch.outer(write[k].flatten(), scale * read[k].flatten())
    return matrix


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def layer_norm(x: Tensor, tensors: dict[str, Tensor], name: str) -> Tensor:
    """LayerNorm over the channels; without weights of that name nothing happens."""
    if f"{name}.weight" not in tensors:
        return x
    centred = x - x.mean(-1, keepdim=True)
    deviation = (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return centred / deviation * tensors[f"{name}.weight"] + tensors[f"{name}.bias"]


def linear(x: Tensor, tensors: dict[str, Tensor], name: str) -> Tensor:
    return x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]


def sbm(x: Tensor, tensors: dict[str, Tensor], *, split: bool, mode: str = "bicubic") -> Tensor:
    """The mixer on x (B, H, W, d) with the parameters of ours; what has none is left out."""
    dim, size = x.shape[-1], (x.shape[1], x.shape[2])
    p = depthwise(linear(x, tensors, "in_proj"), tensors["conv.weight"], tensors["conv.bias"])
    if "pre_proj.weight" in tensors:
        p = linear(p, tensors, "pre_proj")
    for_u, for_v = (p[..., :dim], p[..., dim:]) if split else (p, p)
    u = v = None
    if "bilinear.space_read" in tensors:
        read, write = tensors["bilinear.space_read"], tensors["bilinear.space_write"]
        matrix = spatial_matrix(read, write, size, mode)
        u = linear(matrix @ for_u.flatten(1, 2), tensors, "bilinear.proj").unflatten(1, size)
    if "lin_proj.weight" in tensors:
        v = linear(for_v, tensors, "lin_proj")
    f = v if u is None else silu(u) if v is None else silu(u) * v
    h = layer_norm(f, tensors, "norm")
    if "gate_proj.weight" in tensors:
        h = silu(linear(x, tensors, "gate_proj")) * h
    return linear(h, tensors, "out_proj") if "out_proj.weight" in tensors else h


def conv(x: Tensor, tensors: dict[str, Tensor], name: str, stride: int = 1) -> Tensor:
    """A convolution of (B, C, H, W) that pads half a kernel, depthwise if its weights are."""
    weight = tensors[f"{name}.weight"]
    groups = 1 if weight.shape[1] == x.shape[1] else x.shape[1]
    half = weight.shape[-1] // 2
    return F.conv2d(x, weight, tensors.get(f"{name}.bias"), stride, half, groups=groups)


def batch_norm(x: Tensor, tensors: dict[str, Tensor], name: str) -> Tensor:
    """In evaluation, by the running statistics."""
    mean, var, weight, bias = (
        tensors[f"{name}.{key}"][:, None, None]
        for key in ("running_mean", "running_var", "weight", "bias")
    )
    return (x - mean) / (var + 1e-5).sqrt() * weight + bias


def network(
    images: Tensor,
    tensors: dict[str, Tensor],
    *,
    split: bool,
    shortcut: bool = True,
    mode: str = "bicubic",
) -> list[Tensor]:
    """The four maps (B, d, h, w) before any norm; what has no parameters is left out."""

    def below(prefix: str) -> dict[str, Tensor]:
        return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}

    stem = below("stem.")
    x = batch_norm(conv(images, stem, "conv1.0", 2), stem, "conv1.1").clamp(min=0)
    y = batch_norm(conv(x, stem, "conv2.0"), stem, "conv2.1").clamp(min=0)
    x = x + batch_norm(conv(y, stem, "conv2.3"), stem, "conv2.4")
    x = batch_norm(conv(x, stem, "conv3.0", 2), stem, "conv3.1").clamp(min=0)
    x = batch_norm(conv(x, stem, "conv3.3"), stem, "conv3.4")
    if "pos_embed" in tensors:
        x = x + resized(tensors["pos_embed"][0], (x.shape[2], x.shape[3]), "bicubic")
    maps = []
    for stage in range(4):
        if stage:
            down = below(f"downsamples.{stage - 1}.")
            x = conv(x, down, "0").clamp(min=0)
            x = conv(x, down, "2", 2).clamp(min=0)
            x = batch_norm(conv(x, down, "4"), down, "5")
        index = 0
        while block := below(f"stages.{stage}.{index}."):
            mixer = {k.removeprefix("mixer."): v for k, v in block.items()}
            if "cpe1.weight" in block:
                x = x + conv(x, block, "cpe1")
            y = sbm(layer_norm(nhwc(x), block, "norm1"), mixer, split=split, mode=mode)
            x = x + nchw(y) if shortcut else nchw(y)
            if "cpe2.weight" in block:
                x = x + conv(x, block, "cpe2")
            y = linear(layer_norm(nhwc(x), block, "norm2"), block, "mlp.fc1")
            y = linear(silu(y), block, "mlp.fc2")
            x = x + nchw(y) if shortcut else nchw(y)
            index += 1
        maps.append(x)
    assert [m.shape[2] for m in maps] == [math.ceil(images.shape[2] / s) for s in (4, 8, 16, 32)]
    return maps


def nhwc(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1)


def nchw(x: Tensor) -> Tensor:
    return x.permute(0, 3, 1, 2)
