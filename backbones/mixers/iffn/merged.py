"""IFFN for inference: batch norms merged into their neighbours, and what is not needed overwritten.

In evaluation a batch norm is an affine map per channel. The one after the concatenation goes into
the affine ends of the branches, the one of the depthwise block into its kernel, and the one after
W2 is a single pass. Layer norms depend on the token and stay. On a CPU a few images are mixed at a
time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.axes import to_nchw, to_nhwc
from backbones.layers.norms import scale_and_shift
from backbones.mixers.iffn.activations import Arb, Base, RPReLU, affine
from backbones.mixers.iffn.depthwise import DepthwiseBlock

CACHE_BYTES = 2**22  # of the hidden map per thread
gelu_ = torch.ops.aten.gelu_  # the only one that has no public name
IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu_,
    "elu": F.elu_,
    "silu": functools.partial(F.silu, inplace=True),
    "relu": F.relu_,
}


class Merged(NamedTuple):
    """The steps of an IFFN whose batch norms are affine maps; see ``IFFN`` for the parts."""

    fc1: nn.Linear
    branches: nn.ModuleList
    bn_mid: nn.BatchNorm1d | None
    ln_mid: nn.LayerNorm | None
    dw: DepthwiseBlock | None
    fc2: nn.Linear
    bn_out: nn.BatchNorm1d | None
    ln_out: nn.LayerNorm | None
    drop: nn.Dropout
    drops_before_dw: bool

    def mix(self, x: Tensor) -> Tensor:
        """All three steps, a few images at a time on a CPU: (B, H, W, C) -> (B, H, W, C)."""
        if x.device.type != "cpu" or self.drop.training:
            return self.mix_piece(x)
        # What lies between W1 and W2 is passed over six times and should stay in the cache.
        hidden_bytes = self.fc2.in_features * x.shape[1] * x.shape[2] * x.element_size()
        num_images = max(1, CACHE_BYTES * torch.get_num_threads() // hidden_bytes)
        pieces = [self.mix_piece(images) for images in x.split(num_images)]
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]

    def mix_piece(self, x: Tensor) -> Tensor:
        """All images at once, (B, H, W, C) -> (B, H, W, C)."""
        return self.project(self.spatial(self.expand(x)))

    def expand(self, x: Tensor) -> Tensor:
        """W1, the branches side by side and their norm, (..., C) -> (..., h)."""
        t = self.join(self.fc1(x))
        if self.ln_mid is not None:
            t = self.ln_mid(t)
        return self.drop(t) if self.drops_before_dw else t

    def join(self, z: Tensor) -> Tensor:
        """The branches side by side and their batch norm, (..., h / N) -> (..., h)."""
        if len(self.branches) == 1 and self.bn_mid is None:
            return self.branches[0](z)
        # In one pass: the affine end of each branch, the batch norm and the concatenation.
        width = z.shape[-1]
        t = z.new_empty(*z.shape[:-1], width * len(self.branches))
        scale, shift = scale_and_shift(self.bn_mid, t)
        for index, module in enumerate(self.branches):
            part = slice(index * width, (index + 1) * width)
            inner, own_scale, own_shift = begin(cast("Base | Arb | RPReLU", module), z)
            part_scale, part_shift = scale[part], shift[part]
            if own_shift is not None:
                part_shift = affine(own_shift, part_scale, part_shift)
            if own_scale is not None:
                part_scale = own_scale * part_scale
            affine(inner, part_scale, part_shift, out=t[..., part])
        return t

    def spatial(self, t: Tensor) -> Tensor:
        """The depthwise block with its batch norm in the kernel, (B, H, W, h) -> the same."""
        if self.dw is None or self.dw.order != "bn_act":
            return t if self.dw is None else self.dw(t)
        scale, shift = scale_and_shift(self.dw.bn, t)
        kernel, centre = self.dw.conv.weight, self.dw.conv.kernel_size[0] // 2
        if self.dw.residual:
            kernel = kernel.clone()
            kernel[:, :, centre, centre] += 1
        kernel = kernel * scale[:, None, None, None]
        bias = affine(cast("Tensor", self.dw.conv.bias), scale, shift)
        convolved = F.conv2d(to_nchw(t), kernel, bias, padding=centre, groups=len(kernel))
        u = gelu_(to_nhwc(convolved))
        return t + u if self.dw.shortcut else u

    def project(self, t: Tensor) -> Tensor:
        """W2 and its norm, (..., h) -> (..., C)."""
        y = self.fc2(t if self.drops_before_dw else self.drop(t))
        if self.bn_out is not None:
            affine(y, *scale_and_shift(self.bn_out, y), out=y)
        if self.ln_out is not None:
            y = self.ln_out(y)
        return self.drop(y)


def begin(branch: Base | Arb | RPReLU, z: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """A branch up to its affine end: y, and the scale and shift (C,) that follow, if any do."""
    if isinstance(branch, Arb):
        inner = affine(z, branch.alpha, branch.gamma)
        return IN_PLACE.get(branch.base.name, branch.base)(inner), branch.beta, branch.theta
    if isinstance(branch, RPReLU):
        return branch.base(z - branch.g.to(z.dtype)), None, branch.z
    return branch(z), None, None
