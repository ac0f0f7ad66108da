"""The recurrence of ``ss2d`` and ``bi_wkv`` as a Triton kernel on a GPU, compiled networks too.

No GPU has timed it yet. In Triton's interpreter its numbers equal torch's to 1e-10.
"""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from backbones.fast import trial
from backbones.fast.base import FastModule
from backbones.fast.triton import choice
from backbones.layers.eager import is_switched_off
from backbones.layers.scans import Scan, scan

TRIED = (150, 3, 7)  # tokens in several chunks, lanes that fill no block


def compare_with_torch(device: torch.device, dtype: torch.dtype) -> list[trial.Result]:
    """Run the kernel beside the scan in chunks, forward and backward."""
    importlib.import_module("backbones.fast.triton.scan")  # defines the operator
    generator = torch.Generator().manual_seed(0)
    decays, values = torch.randn(2, *TRIED, generator=generator, dtype=torch.float64)
    inputs = {"log_decay": -decays.exp() / 4, "values": values}
    return trial.compare(torch.ops.mixerlab.linear_scan, scan, inputs, device, dtype)


KERNEL = choice.register_kernel(
    choice.Kernel("scan", compare_with_torch, {torch.float32: 1e-4, torch.float64: 1e-9})
)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def kernel_serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if the kernel computes in this type on this device.

    The switch of a thread is read here as well, for compilers, which cannot trace it.
    """
    return not is_switched_off.get() and choice.serve(KERNEL, device, dtype)


class FastScan(FastModule, Scan):  # type: ignore[misc]
    """All states by one operator."""

    needs_operators = False
    is_traceable = True

    def serves(self, log_decay: Tensor, values: Tensor) -> bool:
        """Return True on a GPU in a type that the kernel takes."""
        return values.is_cuda and kernel_serves(values.device, values.dtype)

    def compute(self, log_decay: Tensor, values: Tensor) -> Tensor:
        """Return all states: two of (n, ...) -> (n, ...)."""
        return torch.ops.mixerlab.linear_scan(log_decay, values)
