"""MogaNet, Eq. 8 and 9, with the convolution as a sum of shifted maps."""

import torch.nn.functional as F

from tests.references.field import depthwise, pointwise

CASES = [{}, {"kernel_size": 5, "hidden_ratio": 2}]


def reference(mixer, x):
    z = F.gelu(depthwise(mixer.dwconv, pointwise(mixer.fc1, x)))
    one = F.gelu(pointwise(mixer.decompose, z))
    return pointwise(mixer.fc2, z + mixer.sigma.flatten() * (z - one))


def macs(mixer, c, h, w):
    hidden, k = mixer.fc1.out_channels, mixer.dwconv.kernel_size[0]
    return h * w * (2 * c * hidden + k * k * hidden + hidden)
