"""IFFN as one operator: W2 (n + gelu(BN(DW(n)))) + b2, n = LN(concat_i Arb_i(W1 x + b1)).

``csrc/layered.cpp`` takes a few hundred tokens through all steps while they are in the cache. In
training the batch norm makes it pause behind the convolution. The backward pass keeps x, the narrow
layer z, n and the convolution's output u. ``csrc/branched.cpp`` is the form of ``iffn_bn``, with
batch norms and without shortcut, which keeps no n.

Time of the network with over without it, on an AMD EPYC with AVX-512: ``deit_t`` 0.68 and 0.70 in
evaluation (batch 1 and 8), 0.69 in training (batch 4); ``poolformer_s12`` 0.55 (batch 1).

Axes: B images, H W map, C channels, w channels of z, h = N w hidden channels.
"""

from __future__ import annotations

from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn

from backbones.fast.base import FastModule
from backbones.layers.norms import normalise
from backbones.mixers.iffn.activations import Arb
from backbones.mixers.iffn.mixer import IFFN

COEFFICIENTS = ("alpha", "beta", "gamma", "theta")


class FastIFFN(FastModule, IFFN):
    """IFFN as released or between batch norms, with GELU, coefficients and a kernel of side 3."""

    def serves(self, x: Tensor, prefix: Tensor | None = None) -> bool:
        """Return True for the options that the operators compute, without prefix tokens."""
        # Parts are read from torch's dictionaries, which takes a tenth of an attribute's time.
        modules = self._modules
        dw, fc1, fc2 = cast("Any", modules.get("dw")), cast("Any", modules["fc1"]), modules["fc2"]
        if prefix is not None or dw is None:
            return False
        conv, bn = dw._modules["conv"], dw._modules["bn"]
        form = (dw.residual, dw.shortcut, dw.order)
        if modules.get("ln_mid") is None:
            bn_mid = modules.get("bn_mid")
            is_form = (
                form == (False, False, "bn_act")
                and modules.get("ln_out") is None
                and _keeps_averages(bn_mid)
                and bn_mid.training == bn.training
            )
        else:
            is_form = form == (False, True, "bn_act") and _is_affine(modules["ln_mid"])
        return (
            is_form
            and x.shape[-1] == fc1.in_features
            and x.numel() > x.shape[-1]  # a batch norm needs several tokens
            and not (self.drop.training and self.drop.p)
            and all(
                type(b) is Arb and b.base.name == "gelu" for b in cast("Any", modules["branches"])
            )
            and type(conv) is nn.Conv2d
            and conv.kernel_size == (3, 3)
            and type(fc1) is type(fc2) is nn.Linear
            and _keeps_averages(bn)
        )

    def compute(self, x: Tensor, prefix: None = None) -> Tensor:
        """Mix a map: (B, H, W, C) -> (B, H, W, C)."""
        size, tokens = (x.shape[1], x.shape[2]), x.shape[:-1].numel()
        bn_mid, bn_dw = self.bn_mid, cast("Any", self.dw).bn
        if bn_mid is None:
            y, statistics = layered_mixer(x.flatten(1, 2), size, *operands(self))
            if bn_dw.training:
                _update(bn_dw, statistics[0], statistics[1], tokens)
            return (y if self.ln_out is None else self.ln_out(y)).unflatten(1, size)
        y, statistics = branched_mixer(x.flatten(1, 2), size, *operands(self))
        if bn_mid.training:
            _update(bn_mid, statistics[0], statistics[1], tokens)
            _update(bn_dw, statistics[2], statistics[3], tokens)
        return normalise(y, self.bn_out).unflatten(1, size)


def operands(mixer: IFFN) -> tuple[Any, ...]:
    """Return the mixer's arguments of its operator after tokens and size."""
    modules: Any = mixer._modules
    block = modules["dw"]._modules
    fc1, fc2, conv = (
        modules["fc1"]._parameters,
        modules["fc2"]._parameters,
        block["conv"]._parameters,
    )
    bn, branches = block["bn"], modules["branches"]._modules.values()
    norms = (modules.get("ln_mid") or modules["bn_mid"], bn)
    return (
        (fc1["weight"], fc1["bias"]),
        [branch._parameters[name] for branch in branches for name in COEFFICIENTS],
        [norm._parameters[name] for norm in norms for name in ("weight", "bias")],
        [
            norm._buffers[name]
            for norm in norms
            for name in ("running_mean", "running_var")
            if name in norm._buffers
        ],
        (norms[0].eps, bn.eps),
        bn.training,
        (conv["weight"], conv["bias"]),
        (fc2["weight"], fc2["bias"]),
    )


def layered_mixer(
    tokens: Tensor,
    size: tuple[int, int],
    first: tuple[Tensor, Tensor],
    coefficients: list[Tensor],
    norms: list[Tensor],
    running: list[Tensor],
    eps: tuple[float, float],
    training: bool,
    depthwise: tuple[Tensor, Tensor],
    last: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Mix a map (B, H W, C); return it with the batch norm's mean and variance, (2, h).

    Args:
        tokens: See ``branched_mixer``, as for the others.
        size: (H, W).
        first: W1 and b1.
        coefficients: Of the branches.
        norms: Weight and bias of the layer norm, then of the batch norm, each (h,).
        running: Running mean and variance of the batch norm, each (h,).
        eps: Of both norms.
        training: Normalise by the batch's statistics.
        depthwise: Kernel and bias.
        last: W2 and b2.
    """
    keep = training or _needs_gradients(tokens, *first, *coefficients, *norms, *depthwise, *last)
    y, *_, statistics = torch.ops.mixerlab.layered_mixer(
        tokens.contiguous(), *size, *first, coefficients, norms, running, *eps, training,
        *depthwise, *last, keep,
    )  # fmt: skip
    return y, statistics


def branched_mixer(
    tokens: Tensor,
    size: tuple[int, int],
    first: tuple[Tensor, Tensor],
    coefficients: list[Tensor],
    norms: list[Tensor],
    running: list[Tensor],
    eps: tuple[float, float],
    training: bool,
    depthwise: tuple[Tensor, Tensor],
    last: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Mix a map (B, H W, C); return it with the statistics of the batch, (4, h).

    Args:
        tokens: (B, H W, C).
        size: (H, W).
        first: W1 (w, C) and b1 (w,).
        coefficients: alpha, beta, gamma, theta of one branch after the other, each (w,).
        norms: Weight and bias of both norms, each (h,).
        running: Running mean and variance of both norms, each (h,).
        eps: Of both norms.
        training: Normalise by the batch's statistics, and return mean and biased variance of
            either norm; otherwise the returned statistics are undefined.
        depthwise: Kernel (h, 1, 3, 3) and bias (h,).
        last: W2 (C, h) and b2 (C,).
    """
    keep = training or _needs_gradients(tokens, *first, *coefficients, *norms, *depthwise, *last)
    y, _, _, statistics = torch.ops.mixerlab.branched_mixer(
        tokens.contiguous(), *size, *first, coefficients, norms, running, *eps, training,
        *depthwise, *last, keep,
    )  # fmt: skip
    return y, statistics[1:]


@torch.no_grad()
def _update(norm: nn.BatchNorm1d, mean: Tensor, variance: Tensor, count: int) -> None:
    """Average a batch's mean and biased variance of ``count`` values into the running ones."""
    cast("Tensor", norm.num_batches_tracked).add_(1)
    momentum = cast("float", norm.momentum)
    cast("Tensor", norm.running_mean).lerp_(mean, momentum)
    cast("Tensor", norm.running_var).lerp_(variance * (count / (count - 1)), momentum)


def _needs_gradients(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _is_affine(norm: nn.Module | None) -> bool:
    """Return True for a layer norm over the channels with weight and bias."""
    return (
        type(norm) is nn.LayerNorm
        and len(norm.normalized_shape) == 1
        and norm._parameters["weight"] is not None
        and norm._parameters["bias"] is not None
    )


def _keeps_averages(norm: nn.Module | None) -> TypeGuard[nn.BatchNorm1d]:
    """Return True for a batch norm that keeps exponential averages of its statistics."""
    return (
        type(norm) is nn.BatchNorm1d
        and norm._buffers["running_mean"] is not None
        and norm.affine
        and norm.momentum is not None
    )
