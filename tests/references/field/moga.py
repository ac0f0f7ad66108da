"""MogaNet, Eq. 4 to 7, with convolutions as sums of shifted maps."""

import torch

from tests.references.field import depthwise, pointwise


def silu(x):
    return x / (1 + torch.exp(-x))


def reference(mixer, x):
    c = x.shape[-1]
    middle, far = 3 * c // 8, c // 2
    p = pointwise(mixer.proj_1, x)
    z = silu(p + mixer.sigma.flatten() * (p - p.mean((1, 2), keepdim=True)))
    a = depthwise(mixer.conv0, z)
    orders = [
        a[..., : c - middle - far],
        depthwise(mixer.conv1, a[..., c - middle - far : c - far], 2),
        depthwise(mixer.conv2, a[..., c - far :], 3),
    ]
    context = pointwise(mixer.context, torch.cat(orders, -1))
    return pointwise(mixer.proj_2, silu(pointwise(mixer.gate, z)) * silu(context)) + x


def macs(mixer, c, h, w):
    return h * w * (4 * c * c + 25 * c + 25 * 3 * c // 8 + 49 * c // 2)
