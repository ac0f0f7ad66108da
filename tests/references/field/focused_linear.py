"""FLatten's attention with a weight per pair of tokens, head by head."""

import torch
import torch.nn.functional as F

from tests.references.field import depthwise, pointwise
from tests.references.field.mlla import weighted

CASES = [{}, {"num_heads": 3, "power": 4.0, "kernel_size": 3, "qkv_bias": False}]


def table(mixer, h, w):
    """Positions (1, N, C), resampled to another map size."""
    maps = mixer.positional_encoding.unflatten(1, mixer.built_for).permute(0, 3, 1, 2)
    if (h, w) != mixer.built_for:
        maps = F.interpolate(maps, (h, w), mode="bicubic", antialias=True)
    return maps.flatten(2).mT


def focused(mixer, x):
    u = (x.clamp(min=0) + 1e-6) / (1 + mixer.scale.exp()).log()
    powers = u**mixer.power
    return (
        powers * (u.square().sum(-1, keepdim=True) / powers.square().sum(-1, keepdim=True)) ** 0.5
    )


def local(mixer, v):
    """The convolution that all heads share, of (B, H, W, C)."""
    return torch.cat([depthwise(mixer.dwc, head) for head in v.chunk(mixer.num_heads, -1)], -1)


def reference(mixer, x):
    tokens, c = x.flatten(1, 2), x.shape[-1]
    k, v = pointwise(mixer.kv, tokens).split(c, -1)
    q = focused(mixer, pointwise(mixer.q, tokens))
    k = focused(mixer, k + table(mixer, *x.shape[1:3]))
    heads = zip(*(part.chunk(mixer.num_heads, -1) for part in (q, k, v)), strict=True)
    mixed = torch.cat([weighted(*head, *head[:2]) for head in heads], -1)
    return pointwise(mixer.proj, mixed.reshape(x.shape) + local(mixer, v.reshape(x.shape)))


def macs(mixer, c, h, w):
    side = mixer.dwc.kernel_size[0]
    return h * w * (4 * c * c + side * side * c + 2 * c * c // mixer.num_heads + c)
