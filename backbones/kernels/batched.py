"""y_g = W_g x_g + b in one operator: a batch of products by matrix products of our own.

``csrc/batched.cpp`` serves mixers that multiply the tokens of windows by a matrix for each group
(``layers/batched_products``) where no gradient is recorded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

NAME = "mixerlab::batched"


def batched(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """(G, M, K), (G, K, N) and (M,) -> (G, M, N)."""
    values = None if bias is None else bias.to(left.dtype).flatten().contiguous()
    y: Tensor = torch.ops.mixerlab.batched(left.contiguous(), right.contiguous(), values)
    return y


def register() -> None:
    """Tell torch what the operator is on "meta" and in a count."""
    torch.library.register_fake(NAME, _fake)
    register_flop_formula(torch.ops.mixerlab.batched)(_flops)


def _fake(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    return left.new_empty(*left.shape[:2], right.shape[2])


def _flops(left_shape: Any, right_shape: Any, *rest: Any, **_: Any) -> int:
    """Two per multiply-add."""
    return int(2 * torch.Size(left_shape).numel() * right_shape[2])
