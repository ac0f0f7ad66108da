"""SBM where no gradient is recorded: the same operations on matrices, without views between them.

On a map of 14 x 14 tokens and 64 channels the operations themselves take 0.18 ms, and what torch
does between them a third of that again: views, expanded batches, modules called by hooks' way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.eager import is_eager
from backbones.layers.fused_forms import is_plain
from backbones.layers.linear import linear

if TYPE_CHECKING:
    from backbones.mixers.sbm.mixer import StarBilinearMapping

PLAIN = (torch.float32, torch.float64)


def is_usual(mixer: StarBilinearMapping, x: Tensor) -> bool:
    """Whether this is Eq. 2 whole, on a CPU, no gradient is recorded, and nobody looks inside."""
    bilinear = mixer.bilinear
    return (
        not torch.is_grad_enabled()
        and is_eager(x)
        and x.device.type == "cpu"
        and x.dtype in PLAIN
        and x.is_contiguous()
        and x.shape[-1] == mixer.dim
        and not torch.is_autocast_enabled("cpu")
        and bilinear is not None
        and bilinear.rank < x.shape[1] * x.shape[2]  # the order of products that it takes
        and type(bilinear.proj) is nn.Linear
        and type(mixer.conv) is nn.Conv2d
        and mixer.conv.padding_mode == "zeros"
        and type(mixer.in_proj) is nn.Linear
        and mixer.in_proj.out_features == 2 * mixer.dim
        and type(mixer.pre_proj) is nn.Identity
        and type(mixer.lin_proj) is nn.Linear
        and type(mixer.norm) is nn.LayerNorm
        and type(mixer.gate_proj) is nn.Linear
        and is_plain(mixer, x.dtype)
    )


def mix_evaluation(mixer: StarBilinearMapping, x: Tensor) -> Tensor:
    """SiLU(x W_G) * LN(SiLU(U) * V), before ``out_proj``: (B, h, w, C) -> (B, h, w, C)."""
    bilinear, lin_proj, gate_proj = mixer.bilinear, mixer.lin_proj, mixer.gate_proj
    assert bilinear is not None
    assert lin_proj is not None
    assert gate_proj is not None
    batch, height, width, dim = x.shape
    count, tokens = height * width, x.view(-1, dim)
    both = _linear(mixer.in_proj, tokens).view(batch, height, width, 2 * dim)
    conv = mixer.conv
    both = F.conv2d(
        both.permute(0, 3, 1, 2), conv.weight, conv.bias, 1, conv.padding, 1, conv.groups
    )
    both = both.permute(0, 2, 3, 1).reshape(-1, 2 * dim)
    read, write = (one.reshape(-1, count) for one in bilinear.factors((height, width)))
    proj = bilinear.proj
    if batch == 1:
        latent = torch.mm(torch.mm(read, both[:, :dim]), proj.weight.t())
        star = torch.addmm(proj.bias, write.t(), latent)
    else:
        seen = torch.bmm(read.expand(batch, -1, -1), both[:, :dim].view(batch, count, dim))
        latent = F.linear(seen, proj.weight)
        star = torch.baddbmm(proj.bias, write.t().expand(batch, -1, -1), latent).view(-1, dim)
    star = F.silu(star, inplace=True).mul_(_linear(lin_proj, both[:, dim:]))
    norm = mixer.norm
    assert isinstance(norm, nn.LayerNorm)
    star = F.layer_norm(star, (dim,), norm.weight, norm.bias, norm.eps)
    return star.mul_(F.silu(_linear(gate_proj, tokens), inplace=True)).view(x.shape)


def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """A linear layer on (n, C)."""
    return linear(x, layer.weight, layer.bias)
