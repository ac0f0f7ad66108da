"""A batch norm in evaluation, in place: for the last step of an operator's mixer.

``csrc/normalise.cpp`` goes over the map once; torch makes a new map, or the norm's affine map in
five small operations, which on a small map take as long as its matrix products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

NAME = "mixerlab::normalise_"


def suits(norm: nn.BatchNorm1d, y: Tensor) -> bool:
    """Whether all that the norm has is there, on the CPU and of the map's type."""
    values = (
        *norm._parameters.values(),
        norm._buffers["running_mean"],
        norm._buffers["running_var"],
    )
    return y.device.type == "cpu" and all(
        value is not None and value.dtype is y.dtype and value.is_contiguous() for value in values
    )


def normalise_(y: Tensor, norm: nn.BatchNorm1d) -> Tensor:
    """Norm (..., C) over its last axis by the running statistics, in place."""
    own, kept = norm._parameters, norm._buffers
    torch.ops.mixerlab.normalise_(
        y, own["weight"], own["bias"], kept["running_mean"], kept["running_var"], norm.eps
    )
    return y


def register() -> None:
    """Tell torch what the operator is on "meta" and in a count."""
    torch.library.register_fake(NAME, _fake)
    register_flop_formula(torch.ops.mixerlab.normalise_)(_no_flops)


def _fake(y: Tensor, *rest: Any) -> None:
    """Nothing is new."""


def _no_flops(*shapes: Any, **_: Any) -> int:
    return 0
