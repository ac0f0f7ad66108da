"""The recurrence of ``ss2d`` and ``bi_wkv`` as a Triton kernel on a GPU, compiled networks too.

No GPU has timed it yet. In Triton's interpreter its numbers equal torch's to 1e-10.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec

import torch
from torch import Tensor

from backbones.fast import first_use
from backbones.fast.base import FastModule
from backbones.fast.library import find_switch
from backbones.layers.eager import is_switched_off
from backbones.layers.scans import Scan, scan

TYPES = (torch.float32, torch.float64)
TRIED = (150, 3, 7)  # tokens in several chunks, lanes that fill no block


@torch.compiler.assume_constant_result
def kernel_serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if the kernel computes in this type on this device."""
    # Of a thread, and read here for compilers, which cannot trace it.
    if is_switched_off.get() or find_switch():
        return False
    if dtype not in TYPES or find_spec("triton") is None:
        return False
    generator = torch.Generator().manual_seed(0)
    decays, values = torch.randn(2, *TRIED, generator=generator, dtype=torch.float64)
    return first_use.serves(
        "the scan's Triton kernel", device, dtype, load_kernel, scan, (-decays.exp() / 4, values)
    )


def load_kernel() -> first_use.Function:
    """Return the operator."""
    importlib.import_module("backbones.fast.triton.scan")
    return torch.ops.mixerlab.linear_scan


class FastScan(FastModule, Scan):
    """All states by one operator."""

    operators_on = ()
    is_traceable = True

    def serves(self, log_decay: Tensor, values: Tensor) -> bool:
        """Return True on a GPU in a type that the kernel takes."""
        return values.is_cuda and kernel_serves(values.device, values.dtype)

    def compute(self, log_decay: Tensor, values: Tensor) -> Tensor:
        """Return all states: two of (n, ...) -> (n, ...)."""
        return torch.ops.mixerlab.linear_scan(log_decay, values)
