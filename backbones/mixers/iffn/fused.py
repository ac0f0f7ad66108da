"""IFFN as one compiled operator, where that serves; see ``backbones/kernels``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from backbones import kernels
from backbones.kernels.branched_mixer import branched_mixer
from backbones.layers.fused_forms import is_plain
from backbones.layers.norms import normalise, scale_and_shift
from backbones.mixers.iffn.activations import Arb, affine

if TYPE_CHECKING:
    from backbones.mixers.iffn.depthwise import DepthwiseBlock
    from backbones.mixers.iffn.mixer import IFFN


def serves(mixer: IFFN, x: Tensor) -> bool:
    """Whether the operator computes just what this mixer is, and nobody looks inside."""
    return (
        kernels.serves(x)
        and x.shape[-1] == mixer.fc1.in_features
        and _is_usual(mixer)
        and not (mixer.drop.training and mixer.drop.p)
        and x.numel() > x.shape[-1]  # a batch norm has to be told of more than one token
        and is_plain(mixer, kernels.weight_dtype(x))
        # Statistics of a batch are not kept in half precision.
        and (kernels.weight_dtype(x).itemsize > 2 or not mixer.training)
    )


def mix(mixer: IFFN, x: Tensor, prefix: Tensor | None) -> Tensor:
    """Eq. 5 of a map, (B, H, W, C) -> the same."""
    bn_mid, bn_out = cast("nn.BatchNorm1d", mixer.bn_mid), mixer.bn_out
    dw = cast("DepthwiseBlock", mixer.dw)
    size = (x.shape[1], x.shape[2])
    y, statistics = branched_mixer(x.flatten(1, 2), size, *weights(mixer))
    if bn_mid.training:
        tokens = x.shape[:-1].numel()
        remember(bn_mid, statistics[0], statistics[1], tokens)
        remember(dw.bn, statistics[2], statistics[3], tokens)
    if bn_out is not None and not (bn_out.training or torch.is_grad_enabled()):
        affine(y, *scale_and_shift(bn_out, y), out=y)
    else:
        y = normalise(y, bn_out)
    return y.unflatten(1, size)


def weights(mixer: IFFN) -> Sequence[Any]:
    """The operator's arguments behind tokens and size."""
    # Each name is looked up once: torch finds a module's parts slowly.
    bn_mid, dw = cast("nn.BatchNorm1d", mixer.bn_mid), cast("DepthwiseBlock", mixer.dw)
    bn, conv, fc1, fc2 = dw.bn, dw.conv, mixer.fc1, mixer.fc2
    branches = [cast("Arb", branch) for branch in mixer.branches]
    return (
        (fc1.weight, fc1.bias),
        [part for b in branches for part in (b.alpha, b.beta, b.gamma, b.theta)],
        [bn_mid.weight, bn_mid.bias, bn.weight, bn.bias],
        [*_running(bn_mid), *_running(bn)],
        (bn_mid.eps, bn.eps),
        bn_mid.training,
        (conv.weight, cast("Tensor", conv.bias)),
        (fc2.weight, fc2.bias),
    )


@torch.no_grad()
def remember(norm: nn.BatchNorm1d, mean: Tensor, variance: Tensor, count: int) -> None:
    """Take a batch's mean and biased variance over ``count`` values into the running statistics."""
    cast("Tensor", norm.num_batches_tracked).add_(1)
    momentum = cast("float", norm.momentum)
    cast("Tensor", norm.running_mean).lerp_(mean, momentum)
    cast("Tensor", norm.running_var).lerp_(variance * (count / (count - 1)), momentum)


def _running(norm: nn.BatchNorm1d) -> tuple[Tensor, Tensor]:
    return cast("Tensor", norm.running_mean), cast("Tensor", norm.running_var)


def _is_usual(mixer: IFFN) -> bool:
    """Whether the mixer is the paper's: GELU, coefficients, batch norms and a kernel of side 3."""
    dw, bn_mid = mixer.dw, mixer.bn_mid
    if dw is None or bn_mid is None or mixer.ln_out is not None:
        return False
    conv, bn = dw.conv, dw.bn
    return (
        all(type(b) is Arb and b.base.name == "gelu" for b in mixer.branches)
        and (dw.residual, dw.shortcut, dw.order) == (False, False, "bn_act")
        and type(conv) is nn.Conv2d
        and conv.kernel_size == (3, 3)
        and all(type(linear) is nn.Linear for linear in (mixer.fc1, mixer.fc2))
        and _is_plain(bn_mid)
        and _is_plain(bn)
        and bn_mid.training == bn.training
    )


def _is_plain(norm: nn.Module) -> bool:
    """Whether this is a batch norm that averages its statistics exponentially."""
    return (
        type(norm) is nn.BatchNorm1d
        and norm.running_mean is not None
        and norm.affine
        and norm.momentum is not None
    )
