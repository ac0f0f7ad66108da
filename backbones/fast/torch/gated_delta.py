"""The gated delta rule by the Triton kernels of flash-linear-attention, where it is installed.

The kernels take half precision on a GPU and have given NaN for gradients on some (their issue 913),
so that each device tries them with gradients first. Their times were not measured here.
"""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

from backbones.fast import trial
from backbones.fast.base import FastModule
from backbones.fast.triton import choice
from backbones.mixers.recurrent.gated_delta import GatedDeltaRule, delta_rule

HALF = {torch.bfloat16: 0.1, torch.float16: 0.02}  # largest differences in the trial
TOKENS = 150  # of the trial: several of fla's chunks of 64, the last one short


def half_type(x: Tensor) -> torch.dtype | None:
    """Return the type of half precision that a call computes in, or None."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype if x.dtype in HALF else None


def chunks_by_fla(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """Return ``delta_rule`` in the type of the queries, gates in float32."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    gates = (log_decay.mT.float().contiguous(), beta.mT.float().contiguous())
    read, _ = chunk_gated_delta_rule(q, k, v, *gates, scale=1.0)
    return read.transpose(1, 2)


@functools.cache
def find_kernel(key: int, value: int) -> choice.Kernel:
    """Return fla's kernel for heads of d channels of a key and e of a value, with its trial."""

    def compare_with_torch(device: torch.device, dtype: torch.dtype) -> list[trial.Result]:
        return trial.compare(chunks_by_fla, delta_rule, make_inputs(key, value), device, dtype)

    name = f"of fla for the delta rule of {key} and {value} channels"
    return choice.register_kernel(choice.Kernel(name, compare_with_torch, HALF))


def make_inputs(key: int, value: int) -> dict[str, Tensor]:
    """Return the arguments of ``delta_rule``, with decays from weak to those that forget all."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k = torch.nn.functional.normalize(normal(2, 2, 2, TOKENS, key), dim=-1)
    return {
        "q": q * key**-0.5,
        "k": k,
        "v": normal(2, 2, TOKENS, value),
        "log_decay": -(2 * normal(2, 2, TOKENS) - 2).exp(),
        "beta": normal(2, 2, TOKENS).sigmoid(),
    }


class FastGatedDelta(FastModule, GatedDeltaRule):
    """Chunks by fla's ``chunk_gated_delta_rule``."""

    needs_operators = False

    @classmethod
    def may_serve(cls, module: GatedDeltaRule) -> bool:
        """Return True if fla is installed; it comes with pip install -e '.[fla]'."""
        return importlib.util.find_spec("fla") is not None

    def serves(self, x: Tensor, prefix: Tensor | None = None) -> bool:
        """Return True for maps in half precision on a GPU where fla's gradients are right."""
        half = half_type(x)
        if prefix is not None or not x.is_cuda or half is None:
            return False
        key, value = (self.widths[i] // self.num_heads for i in (0, 2))
        return choice.serve(find_kernel(key, value), x.device, half)

    def compute(self, x: Tensor, prefix: None = None) -> Tensor:
        """Run over the rows both ways: (B, H, W, C) -> (B, H, W, C)."""
        half = half_type(x)

        def rule(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
            return chunks_by_fla(q.to(half), k.to(half), v.to(half), log_decay, beta)

        return self.mixed(x, rule)
