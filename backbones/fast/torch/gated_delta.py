"""The gated delta rule by the Triton kernels of flash-linear-attention, where it is installed.

The kernels take half precision on a GPU. Their times were not measured here.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from backbones.fast.base import FastModule
from backbones.mixers.recurrent.gated_delta import GatedDeltaRule

HALF = (torch.bfloat16, torch.float16)


def half_type(x: Tensor) -> torch.dtype | None:
    """Return the type of half precision that a call computes in, or None."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype if x.dtype in HALF else None


class FastGatedDelta(FastModule, GatedDeltaRule):
    """Chunks by fla's ``chunk_gated_delta_rule``."""

    needs_operators = False

    @classmethod
    def may_serve(cls, module: GatedDeltaRule) -> bool:
        """Return True if fla is installed; it comes with pip install -e '.[fla]'."""
        return importlib.util.find_spec("fla") is not None

    def serves(self, x: Tensor, prefix: Tensor | None = None) -> bool:
        """Return True for maps in half precision on a GPU."""
        return prefix is None and x.is_cuda and half_type(x) is not None

    def compute(self, x: Tensor, prefix: None = None) -> Tensor:
        """Run over the rows both ways: (B, H, W, C) -> (B, H, W, C)."""
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        half = half_type(x)

        def rule(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
            q, k, v = (part.transpose(1, 2).to(half) for part in (q, k, v))
            gates = (log_decay.mT.contiguous(), beta.mT.contiguous())
            read, _ = chunk_gated_delta_rule(q, k, v, *gates, scale=1.0)
            return read.transpose(1, 2)

        return self.mixed(x, rule)
