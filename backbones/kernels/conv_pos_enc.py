"""x + DW(x) in one operator: a positional encoding by a depthwise 3x3 convolution.

``csrc/conv_pos_enc.cpp`` serves ``layers/conv_pos_enc`` where no gradient is recorded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

NAME = "mixerlab::conv_pos_enc"


def conv_pos_enc(x: Tensor, kernel: Tensor, bias: Tensor | None = None) -> Tensor:
    """(B, H, W, C), (C, 1, 3, 3) and (C,) -> (B, H, W, C), with zeros around the map."""
    own = None if bias is None else bias.contiguous()
    y: Tensor = torch.ops.mixerlab.conv_pos_enc(x.contiguous(), kernel.contiguous(), own)
    return y


def register() -> None:
    """Tell torch what the operator is on "meta" and in a count."""
    torch.library.register_fake(NAME, _fake)
    register_flop_formula(torch.ops.mixerlab.conv_pos_enc)(_flops)


def _fake(x: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor:
    return torch.empty_like(x)


def _flops(x_shape: Any, *rest: Any, **_: Any) -> int:
    """Two per multiply-add."""
    return int(2 * 9 * torch.Size(x_shape).numel())
