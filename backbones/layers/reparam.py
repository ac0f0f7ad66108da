"""Train-time branches of convolutions, and their exact folding into one plain convolution.

Source: Ding et al., "RepVGG", CVPR 2021, https://arxiv.org/abs/2101.03697, Sec. 3.3; Yun et al.,
"FFNet: MetaMixer-based Efficient Convolutional Mixer Design", App. E, sums depthwise kernels of
several sizes and shapes.

Axes: D input channels, O output channels, k_h x k_w kernel; s = gamma / sqrt(var + eps).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.norms import scale_and_shift
from backbones.layers.pointwise import PointwiseConv2d
from backbones.options import check_odd

Kernel = tuple[int, int]
NO_WAY_BACK = (
    "these weights are of the fused form, from which branches and BatchNorm cannot be "
    "taken out again; build the {part} with {option}, or load weights of the training "
    "form to train it further"
)
M = TypeVar("M", bound=nn.Module)


class Fusible(nn.Module, ABC):
    """A module that in evaluation mode equals one convolution with bias."""

    @abstractmethod
    def fuse(self) -> nn.Conv2d:
        """Return that convolution, of the same dtype, on the same device."""


class ConvBN(Fusible):
    """A convolution without bias, then BatchNorm; an odd kernel keeps the size up to the stride.

    Args:
        dim: Input channels D.
        out: Output channels O.
        kernel_size: Side, or (k_h, k_w), odd.
        stride: Of both axes.
        groups: Of the convolution; D for a depthwise one.

    Shape: (B, D, H, W) -> (B, O, ceil(H / stride), ceil(W / stride)).
    """

    def __init__(
        self, dim: int, out: int, kernel_size: int | Kernel = 1, *, stride: int = 1, groups: int = 1
    ) -> None:
        super().__init__()
        height, width = as_kernel(kernel_size)
        padding = (height // 2, width // 2)
        self.conv: nn.Conv2d
        if (height, width, stride, groups) == (1, 1, 1, 1):
            self.conv = PointwiseConv2d(dim, out, bias=False)
        else:
            self.conv = nn.Conv2d(
                dim, out, (height, width), stride, padding, groups=groups, bias=False
            )
        self.norm = nn.BatchNorm2d(out)

    def forward(self, x: Tensor) -> Tensor:
        """Return BN(conv(x)): (B, D, H, W) -> (B, O, h, w)."""
        return self.norm(self.conv(x))

    @torch.no_grad()
    def fuse(self) -> nn.Conv2d:
        """Return the convolution W' = s W along the outputs, b' = beta - s mean."""
        scale, shift = scale_and_shift(self.norm, self.norm.weight)
        return _plain_conv(self.conv, self.conv.weight * scale[:, None, None, None], shift)


class BranchedConv(Fusible):
    """The sum of depthwise convolutions, each with its BatchNorm; the first kernel is the largest.

    Args:
        dim: Input channels D.
        out: Output channels O, a multiple of D.
        kernels: (k_h, k_w) of every branch, odd; they name the branches ("7x7").
        stride: Of both axes.

    Shape: (B, D, H, W) -> (B, O, ceil(H / stride), ceil(W / stride)).

    Raises:
        ValueError: A branch that is larger than the first one.
    """

    def __init__(self, dim: int, out: int, kernels: Sequence[Kernel], *, stride: int = 1) -> None:
        super().__init__()
        first = kernels[0]
        for kernel in kernels:
            if kernel[0] > first[0] or kernel[1] > first[1]:
                raise ValueError(
                    f"a branch of {kernel_name(kernel)} cannot fold into the first one, which is "
                    f"{kernel_name(first)}; give kernels of at most its size"
                )
        self.branches = nn.ModuleDict(
            {
                kernel_name(kernel): ConvBN(dim, out, kernel, stride=stride, groups=dim)
                for kernel in kernels
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of all branches: (B, D, H, W) -> (B, O, h, w)."""
        first, *branches = self.branches.values()
        total = first(x)
        for branch in branches:
            total = total + branch(x)
        return total

    @torch.no_grad()
    def fuse(self) -> nn.Conv2d:
        """Return the sum of all kernels, padded to the first one's size, and of their biases."""
        convs = [cast("ConvBN", branch).fuse() for branch in self.branches.values()]
        height, width = as_kernel(convs[0].kernel_size)
        weight = sum(
            F.pad(conv.weight, (pad_w, pad_w, pad_h, pad_h))
            for conv in convs
            for pad_h, pad_w in [
                ((height - conv.kernel_size[0]) // 2, (width - conv.kernel_size[1]) // 2)
            ]
        )
        bias = sum(cast("Tensor", conv.bias) for conv in convs)
        return _plain_conv(convs[0], cast("Tensor", weight), cast("Tensor", bias))


class SkipNormConv(Fusible):
    """x + W BN(x) with a 1x1 convolution: here BatchNorm comes first, and there is a skip.

    Shape: (B, D, H, W) -> (B, D, H, W).
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(dim)
        self.conv = PointwiseConv2d(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return x + W BN(x): (B, D, H, W) -> (B, D, H, W)."""
        return x + self.conv(self.norm(x))

    @torch.no_grad()
    def fuse(self) -> nn.Conv2d:
        """Return W' = s W along the inputs + I, b' = W (beta - s mean); exact without padding."""
        scale, shift = scale_and_shift(self.norm, self.norm.weight)
        weight = self.conv.weight * scale[None, :, None, None]
        identity = torch.eye(len(scale), dtype=scale.dtype, device=scale.device)
        return _plain_conv(
            self.conv, weight + identity[:, :, None, None], self.conv.weight[:, :, 0, 0] @ shift
        )


def fuse(module: M) -> M:
    """Replace every fusible part inside a module by its plain convolution, in place.

    What the module computes in evaluation mode stays the same up to rounding; what it computes in
    training mode changes, since batch norms are gone.
    """
    for name, child in module.named_children():
        setattr(module, name, child.fuse() if isinstance(child, Fusible) else fuse(child))
    return module


def is_fused(module: nn.Module) -> bool:
    """Return True if all fusible parts of a module are folded."""
    return not any(isinstance(part, Fusible) for part in module.modules())


def depthwise(dim: int, kernel_size: int, branches: Sequence[Kernel] | None = None) -> nn.Module:
    """Build a depthwise convolution of a square kernel: with branches, or plain with bias.

    Args:
        dim: Channels D.
        kernel_size: Side, odd.
        branches: Kernels beside the square one; () leaves it alone with its BatchNorm, None gives a
            plain convolution with bias and without BatchNorm.

    Shape: (B, D, H, W) -> (B, D, H, W).
    """
    if branches is None:
        side = as_kernel(kernel_size)[0]
        return nn.Conv2d(dim, dim, side, padding=side // 2, groups=dim)
    if not branches:
        return ConvBN(dim, dim, kernel_size, groups=dim)
    return BranchedConv(dim, dim, [as_kernel(kernel_size), *branches])


def as_kernel(size: int | Sequence[int]) -> Kernel:
    """Return (k_h, k_w) of a side or a pair.

    Raises:
        ValueError: A side that is not odd and positive.
    """
    check_odd(size)
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


def kernel_name(kernel: Kernel) -> str:
    """Return a branch's name in state dicts, such as ``7x7``."""
    return f"{kernel[0]}x{kernel[1]}"


def _plain_conv(like: nn.Conv2d, weight: Tensor, bias: Tensor) -> nn.Conv2d:
    """Build a convolution with the given tensors, otherwise like another one."""
    geometry: dict[str, Any] = {}
    if not isinstance(like, PointwiseConv2d):
        geometry = {
            "kernel_size": like.kernel_size,
            "stride": like.stride,
            "padding": like.padding,
            "groups": like.groups,
        }
    conv = nn.utils.skip_init(
        type(like),
        like.in_channels,
        like.out_channels,
        **geometry,
        device=weight.device,
        dtype=weight.dtype,
    )
    conv.weight.copy_(weight)
    conv.bias.copy_(bias)
    return conv.train(like.training)
