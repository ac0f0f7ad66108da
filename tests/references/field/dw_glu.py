"""SANA's Mix-FFN with the convolution as a sum of shifted maps."""

import torch

from tests.references.field import depthwise, pointwise

CASES = [{}, {"kernel_size": 5, "hidden_ratio": 2}]


def silu(x):
    return x / (1 + torch.exp(-x))


def reference(mixer, x):
    hidden = depthwise(mixer.conv_depth, silu(pointwise(mixer.conv_inverted, x)))
    half = hidden.shape[-1] // 2
    return pointwise(mixer.conv_point, hidden[..., :half] * silu(hidden[..., half:]))


def macs(mixer, c, h, w):
    hidden, k = mixer.conv_point.in_features, mixer.conv_depth.kernel_size[0]
    return h * w * (3 * c * hidden + 2 * k * k * hidden)
