"""MMPretrain's SpatialAttention of VAN."""

import pytest

from tests.references.field import as_nchw, as_nhwc, through

NAMES = {
    "conv0.": "spatial_gating_unit.DW_conv.",
    "conv_spatial.": "spatial_gating_unit.DW_D_conv.",
    "conv1.": "spatial_gating_unit.conv1.",
}


def reference(mixer, x):
    van = pytest.importorskip("mmpretrain.models.backbones.van")
    layer = van.SpatialAttention(x.shape[-1])
    return as_nhwc(through(layer, mixer, as_nchw(x), names=NAMES))


def macs(mixer, c, h, w):
    return h * w * (3 * c * c + (5 * 5 + 7 * 7) * c)
