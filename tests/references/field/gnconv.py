"""MMPretrain's gnConv of HorNet."""

import pytest

from tests.references.field import as_nchw, as_nhwc, through

CASES = [{}, {"order": 4, "kernel_size": 3, "scale": 0.5}]


def reference(mixer, x):
    hornet = pytest.importorskip("mmpretrain.models.backbones.hornet")
    conv = {"type": "DW", "kernel_size": mixer.dwconv.kernel_size[0]}
    layer = hornet.gnConv(x.shape[-1], len(mixer.widths), conv, mixer.scale)
    return as_nhwc(through(layer, mixer, as_nchw(x)))


def macs(mixer, c, h, w):
    order, k = len(mixer.projs) + 1, mixer.dwconv.kernel_size[0]
    widths = [c // 2**i for i in range(order)]
    between = sum(wide * wide // 2 for wide in widths[:-1])
    return h * w * (c * (widths[-1] + sum(widths)) + k * k * sum(widths) + between + c * c)
