"""Agent attention head by head, with pooling and tables place by place."""

import torch
import torch.nn.functional as F

from tests.references.field import attention, depthwise, pointwise

CASES = [{}, {"num_heads": 3, "agents": 4, "qkv_bias": False}, {"agents": 49, "grid": (5, 7)}]


def stretched(line, length):
    """A table along one axis (h, n, L), resampled to another length."""
    if line.shape[-1] == length:
        return line
    # As a row: torch enlarges a column with antialias to copies of its first value.
    row = F.interpolate(line[..., None, :], (1, length), mode="bicubic", antialias=True)
    return row[..., 0, :]


def bias(small, rows, columns, h, w):
    """Bias of agents and tokens (h, n, N), from tables (h, n, 7, 7), (h, n, H) and (h, n, W)."""
    maps = F.interpolate(small, (h, w), mode="bilinear", align_corners=False)
    maps = maps + stretched(rows, h)[..., None] + stretched(columns, w)[..., None, :]
    return maps.flatten(2)


def reference(mixer, x):
    _, h, w, c = x.shape
    q, k, v = pointwise(mixer.qkv, x).split(c, -1)
    side = mixer.side
    agents = [
        q[:, i * h // side : -(-(i + 1) * h // side), j * w // side : -(-(j + 1) * w // side)]
        for i in range(side)
        for j in range(side)
    ]
    agents = torch.stack([part.mean((1, 2)) for part in agents], 1)
    first = bias(mixer.an_bias, mixer.ah_bias[0, ..., 0], mixer.aw_bias[0, ..., 0, :], h, w)
    rows, columns = mixer.ha_bias[0, :, :, 0].mT, mixer.wa_bias[0, :, 0].mT
    second = bias(mixer.na_bias, rows, columns, h, w).mT
    heads = []
    for head, parts in enumerate(
        zip(*(y.flatten(1, -2).chunk(mixer.num_heads, -1) for y in (q, agents, k, v)), strict=True)
    ):
        one_q, one_a, one_k, one_v = parts
        gathered = attention(one_a, one_k, one_v, first[head])
        heads.append(attention(one_q, one_a, gathered, second[head]))
    mixed = torch.cat(heads, -1).reshape(x.shape)
    return pointwise(mixer.proj, mixed + depthwise(mixer.dwc, v))


def macs(mixer, c, h, w):
    return h * w * (4 * c * c + 9 * c + 4 * mixer.side**2 * c)
