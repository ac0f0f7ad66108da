"""timm's RepMixer of FastViT, less the shortcut, which is the host's."""

import copy

import torch
from timm.models.fastvit import RepMixer

from backbones.layers.reparam import fuse
from tests.references.field import as_nchw, as_nhwc, through

CASES = [{}, {"kernel_size": 7}]
NAMES = {
    "conv.gamma": "layer_scale.gamma",
    "conv.norm.": "norm.identity.",
    "conv.identity.": "mixer.identity.",
    "conv.mixer.branches.1x1.": "mixer.conv_scale.",
}


def reference(mixer, x):
    side = mixer.conv.mixer.branches[next(iter(mixer.conv.mixer.branches))].conv.kernel_size[0]
    layer = RepMixer(x.shape[-1], side)
    branches = {f"conv.mixer.branches.{side}x{side}.": "mixer.conv_kxk.0."}
    norms = {f"mixer.{conv}.norm.": f"mixer.{conv}.bn." for conv in ("conv_scale", "conv_kxk.0")}
    names = {**NAMES, **branches, **norms}
    y = as_nhwc(through(layer, mixer, as_nchw(x), names=names)) - x
    folded = fuse(copy.deepcopy(mixer))
    torch.testing.assert_close(folded(x.detach()), y.detach())
    return y


def macs(mixer, c, h, w):
    side = next(iter(mixer.conv.mixer.branches.values())).conv.kernel_size[0]
    return h * w * c * (side * side + 1)
