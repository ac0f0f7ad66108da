"""Every channel is a sum of all channels, with fixed weights of length 1."""

import torch


def reference(mixer, x):
    torch.testing.assert_close(mixer.matrix.square().sum(1), torch.ones_like(mixer.matrix[0]))
    return torch.stack([(x * row).sum(-1) for row in mixer.matrix], -1)


def macs(mixer, c, h, w):
    return h * w * c * c
