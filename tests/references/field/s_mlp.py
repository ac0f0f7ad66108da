"""Sums over rows and columns, entry by entry."""

import torch
import torch.nn.functional as F

from tests.references.field import depthwise, pointwise


def normed(norm, x):
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    return F.gelu((x - norm.running_mean) * scale + norm.bias)


def reference(mixer, x):
    h, w = x.shape[1:3]
    u = normed(mixer.norm2, depthwise(mixer.dwconv, normed(mixer.norm1, x)))
    table = {name: mixer.at_size(name, (h, w)) for name in mixer.grid_axes}
    down = [
        sum(table["proj_h.weight"][i, k] * u[:, k] for k in range(h)) + table["proj_h.bias"][i]
        for i in range(h)
    ]
    across = [
        sum(table["proj_w.weight"][j, k] * u[:, :, k] for k in range(w)) + table["proj_w.bias"][j]
        for j in range(w)
    ]
    return pointwise(mixer.fuse, torch.cat([u, torch.stack(down, 1), torch.stack(across, 2)], -1))


def macs(mixer, c, h, w):
    return h * w * c * (9 + h + w + 3 * c)
