"""torchvision's deformable convolution with offsets along one axis."""

import torch
import torch.nn.functional as F
from torchvision.ops import deform_conv2d

from tests.references.field import as_nchw, as_nhwc, pointwise

CASES = [{}, {"share": 3}]


def reference(mixer, x):
    c = x.shape[-1]
    normed = F.layer_norm(x, (c,), mixer.norm.weight, mixer.norm.bias)
    offsets = as_nchw(pointwise(mixer.offset, normed).repeat_interleave(mixer.share, -1))
    nothing = torch.zeros_like(offsets[:, :c])
    branches = []
    for layer, pair in (
        (mixer.atm_w, (nothing, offsets[:, :c])),
        (mixer.atm_h, (offsets[:, c:], nothing)),
    ):
        places = torch.stack(pair, 2).flatten(1, 2)  # row, then column of each channel
        weight = layer.weight[:, :, None, None]
        branches.append(as_nhwc(deform_conv2d(as_nchw(x), places, weight, layer.bias)))
    branches.append(pointwise(mixer.atm_c, x))
    return pointwise(mixer.proj, merged(mixer.fusion, branches))


def merged(layer, branches):
    pooled = sum(branches).mean((1, 2))
    logits = pointwise(layer.fc2, F.gelu(pointwise(layer.fc1, pooled)))
    shares = logits.reshape(len(pooled), -1, 3).softmax(-1)
    return sum(branch * shares[:, None, None, :, n] for n, branch in enumerate(branches))


def macs(mixer, c, h, w):
    merging = c * (c // 4) + (c // 4) * 3 * c
    return h * w * (2 * c * c // mixer.share + 4 * c * c) + merging
