"""IFFN as one compiled operator, where that serves; see ``backbones/kernels``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
from torch import Tensor, nn

from backbones import kernels
from backbones.kernels.branched_mixer import branched_mixer
from backbones.kernels.normalise import normalise_, suits
from backbones.layers.fused_forms import is_plain
from backbones.layers.norms import normalise, scale_and_shift
from backbones.mixers.iffn.activations import Arb, affine

if TYPE_CHECKING:
    from backbones.mixers.iffn.depthwise import DepthwiseBlock
    from backbones.mixers.iffn.mixer import IFFN


COEFFICIENTS = ("alpha", "beta", "gamma", "theta")


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
    return _norm_out(y, bn_out).unflatten(1, size)


def _norm_out(y: Tensor, norm: nn.Module | None) -> Tensor:
    """The norm after W2, in place where no gradient is recorded."""
    if norm is None or torch.is_grad_enabled() or norm.training or not _keeps_averages(norm):
        return normalise(y, norm)
    if suits(norm, y):
        return normalise_(y, norm)
    return affine(y, *scale_and_shift(norm, y), out=y)


def weights(mixer: IFFN) -> Sequence[Any]:
    """The operator's arguments behind tokens and size."""
    own, block = _parts(mixer), _parts(_parts(mixer)["dw"])
    fc1, fc2, conv = own["fc1"]._parameters, own["fc2"]._parameters, block["conv"]._parameters
    bn_mid, bn = own["bn_mid"], block["bn"]
    norms = (bn_mid._parameters, bn._parameters)
    running = (bn_mid._buffers, bn._buffers)
    branches = [branch._parameters for branch in own["branches"]]
    return (
        (fc1["weight"], fc1["bias"]),
        [branch[name] for branch in branches for name in COEFFICIENTS],
        [norm[name] for norm in norms for name in ("weight", "bias")],
        [norm[name] for norm in running for name in ("running_mean", "running_var")],
        (bn_mid.eps, bn.eps),
        bn_mid.training,
        (conv["weight"], conv["bias"]),
        (fc2["weight"], fc2["bias"]),
    )


def _parts(module: Any) -> dict[str, Any]:
    """A module's parts by their names; as attributes torch finds them ten times as slowly."""
    parts: dict[str, Any] = module._modules
    return parts


@torch.no_grad()
def remember(norm: nn.BatchNorm1d, mean: Tensor, variance: Tensor, count: int) -> None:
    """Take a batch's mean and biased variance over ``count`` values into the running statistics."""
    cast("Tensor", norm.num_batches_tracked).add_(1)
    momentum = cast("float", norm.momentum)
    cast("Tensor", norm.running_mean).lerp_(mean, momentum)
    cast("Tensor", norm.running_var).lerp_(variance * (count / (count - 1)), momentum)


def _is_usual(mixer: IFFN) -> bool:
    """Whether the mixer is the paper's: GELU, coefficients, batch norms and a kernel of side 3."""
    own = _parts(mixer)
    dw, bn_mid = own.get("dw"), own.get("bn_mid")
    if dw is None or bn_mid is None or own.get("ln_out") is not None:
        return False
    conv, bn = _parts(dw)["conv"], _parts(dw)["bn"]
    return (
        all(type(b) is Arb and _parts(b)["base"].name == "gelu" for b in own["branches"])
        and (dw.residual, dw.shortcut, dw.order) == (False, False, "bn_act")
        and type(conv) is nn.Conv2d
        and conv.kernel_size == (3, 3)
        and all(type(linear) is nn.Linear for linear in (own["fc1"], own["fc2"]))
        and _keeps_averages(bn_mid)
        and _keeps_averages(bn)
        and bn_mid.training == bn.training
    )


def _keeps_averages(norm: nn.Module) -> TypeGuard[nn.BatchNorm1d]:
    """Whether this is a batch norm whose statistics are an exponential average."""
    return (
        type(norm) is nn.BatchNorm1d
        and norm._buffers["running_mean"] is not None
        and norm.affine
        and norm.momentum is not None
    )
