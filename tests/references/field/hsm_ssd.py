"""timm's HSMSSD, whose constant A cancels."""

import torch
from timm.models.efficientvim import HSMSSD

from tests.references.field import as_nchw, as_nhwc, through

CASES = [{}, {"states": 5, "expansion": 1.5}]
NAMES = {
    "proj.": "BCdt_proj.conv.",
    "dw.": "dw.conv.",
    "hz_proj.": "hz_proj.conv.",
    "out_proj.": "out_proj.conv.",
}


def reference(mixer, x):
    c, states = x.shape[-1], mixer.proj.out_features // 3
    layer = HSMSSD(c, mixer.out_proj.in_features / c, states)
    a = torch.linspace(0, 1, states, dtype=torch.float64)
    tensors = {"A": a, **mixer.state_dict(keep_vars=True)}

    class Map(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(x)[0]

    names = {ours: f"layer.{theirs}" for ours, theirs in {**NAMES, "A": "A", "D": "D"}.items()}
    return as_nhwc(through(Map(), tensors, as_nchw(x), names=names))


def macs(mixer, c, h, w):
    states, inner = mixer.proj.out_features // 3, mixer.out_proj.in_features
    return h * w * 3 * states * (c + 9) + 2 * h * w * states * c + states * 3 * c * inner
