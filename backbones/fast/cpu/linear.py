"""Linear layers by matrix products of our own: y = x W^T + b in one operator.

``csrc/linear.cpp`` is faster where the BLAS that torch brings leaves half of a processor's
registers unused, and elsewhere as fast. It serves layers of PosMLP, of the FFN of SBM's host and of
Hire-MLP, and the 1x1 convolutions of FFNet, SBM and Hire-MLP.

Time of networks with over without it, on an AMD EPYC with AVX-512, at batch 1 in evaluation and
batch 4 in training: ``sbm_t`` 0.77 and 0.80, ``ffnet_1`` 0.68, ``posmlp_t`` 0.87 and 0.70; the
regions of ``hiremlp_t`` alone 0.95 and 0.93.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.fast.base import FastModule, operators_serve
from backbones.fast.library import has_tiles
from backbones.layers.pointwise import PointwiseConv2d
from backbones.mixers.ffn import FFN
from backbones.mixers.token_mlps.hire import HireMixer

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class FastFFN(FastModule, FFN):
    """Both layers by ``linear``, in FFNs with SiLU, which are those of SBM's host.

    FFNs with GELU keep torch's products, as timm's do: mixers are compared with both.
    """

    @classmethod
    def may_serve(cls, module: FFN) -> bool:
        """Return True for SiLU."""
        return module.act == "silu"

    def serves(self, x: Tensor, prefix: Tensor | None = None) -> bool:
        """Return True between linear layers of torch's own."""
        return has_tiles() and prefix is None and type(self.fc1) is type(self.fc2) is nn.Linear

    def compute(self, x: Tensor, prefix: None = None) -> Tensor:
        """Return W2 act(W1 x + b1) + b2: (..., C) -> (..., C)."""
        hidden = F.silu(linear(x, self.fc1.weight, self.fc1.bias))
        return self.drop(linear(self.drop(hidden), self.fc2.weight, self.fc2.bias))


class FastPointwiseConv2d(FastModule, PointwiseConv2d):  # type: ignore[misc]
    """A 1x1 convolution, which on a map in channels-last memory is a linear layer."""

    def serves(self, x: Tensor) -> bool:
        """Return True for maps (B, D, H, W) in channels-last memory."""
        return has_tiles() and x.ndim == 4 and x.movedim(1, -1).is_contiguous()

    def compute(self, x: Tensor) -> Tensor:
        """Return W x + b at every position: (B, D, H, W) -> (B, O, H, W)."""
        y = linear(x.movedim(1, -1), self.weight.flatten(1), self.bias)
        return y.permute(0, 3, 1, 2)


class FastHireMixer(FastModule, HireMixer):
    """The mappings of regions by ``linear``."""

    def serves(self, x: Tensor) -> bool:
        """Return True if the operator's products are as fast as torch's."""
        return has_tiles()

    def compute(self, x: Tensor) -> Tensor:
        """Mix rows and columns: (B, C, H, W) -> (B, C, H, W)."""
        return HireMixer.forward(self, x, linear)


def multiplies(x: Tensor) -> bool:
    """Return True if the operator takes a tensor and its products are as fast as torch's."""
    return x.is_cpu and operators_serve(x) and has_tiles()


def select_linear(x: Tensor) -> Linear:
    """Return ``linear`` if it ``multiplies``, otherwise torch's."""
    return linear if multiplies(x) else F.linear


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b: (..., C), (D, C) and (D,) -> (..., D)."""
    # Some columns of a matrix are read where they are.
    is_columns = x.ndim == 2 and x.stride(1) == 1 and x.stride(0) >= x.shape[1]
    x = x if is_columns else x.contiguous()
    packed_bias = None if bias is None else bias.contiguous()
    y: Tensor = torch.ops.mixerlab.linear(x, weight.contiguous(), packed_bias)
    return y
