"""y = x W^T + b in one operator: torch's linear layer by matrix products of our own.

``csrc/linear.cpp`` serves mixers whose layers stand apart (``layers/linear``): where the BLAS that
torch brings leaves half of a processor's registers unused it is the faster one, and elsewhere as
fast; an activation behind it finds its values in the cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

NAME = "mixerlab::linear"


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """(..., C), (D, C) and (D,) -> (..., D), as ``torch.nn.functional.linear``."""
    y: Tensor = torch.ops.mixerlab.linear(_rows(x), weight.contiguous(), _whole(bias))
    return y


def linear_act(x: Tensor, weight: Tensor, bias: Tensor | None, act: str) -> Tensor:
    """Of ``linear`` the activation "gelu", "relu" or "silu", without a gradient."""
    y: Tensor = torch.ops.mixerlab.linear_act(_rows(x), weight.contiguous(), _whole(bias), act)
    return y


def act(x: Tensor, name: str) -> Tensor:
    """The activation alone, of a tensor without gaps, and without a gradient."""
    y: Tensor = torch.ops.mixerlab.act(x, name)
    return y


def _rows(x: Tensor) -> Tensor:
    """Some columns of a matrix are read where they are."""
    is_columns = x.ndim == 2 and x.stride(1) == 1 and x.stride(0) >= x.shape[1]
    return x if is_columns else x.contiguous()


def _whole(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.contiguous()


def register() -> None:
    """Tell torch what the operator is on "meta" and in a count; see csrc for its gradients."""
    torch.library.register_fake(NAME, _fake)
    torch.library.register_fake(f"{NAME}_backward", _fake_backward)
    torch.library.register_fake(f"{NAME}_act", _fake)
    torch.library.register_fake("mixerlab::act", _fake_act)
    register_flop_formula(torch.ops.mixerlab.linear)(_flops)
    register_flop_formula(torch.ops.mixerlab.linear_act)(_flops)
    register_flop_formula(torch.ops.mixerlab.linear_backward)(_flops_backward)
    register_flop_formula(torch.ops.mixerlab.act)(_no_flops)


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, act: str = "") -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _fake_act(x: Tensor, name: str) -> Tensor:
    return torch.empty_like(x)


def _no_flops(*shapes: Any, **_: Any) -> int:
    return 0


def _fake_backward(
    grad: Tensor, x: Tensor, weight: Tensor, needs_x: bool, needs_weight: bool
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape if needs_x else 0), x.new_empty(weight.shape if needs_weight else 0)


def _flops(x_shape: Any, weight_shape: Any, *rest: Any, **_: Any) -> int:
    """Two per multiply-add."""
    return int(2 * torch.Size(x_shape).numel() * weight_shape[0])


def _flops_backward(
    grad_shape: Any, x_shape: Any, weight_shape: Any, needs_x: bool, needs_weight: bool, **_: Any
) -> int:
    """A product for either gradient."""
    return _flops(x_shape, weight_shape) * (needs_x + needs_weight)
