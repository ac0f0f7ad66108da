"""Try a Triton kernel on a device before its first use there.

The kernel computes a small input in either direction, beside torch's own operations in 64 bits.
Where it cannot be compiled or launched, or gives other numbers, one warning says which, and torch's
operations serve: no network fails because of a kernel.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from backbones.fast.trial import Result, largest_difference
from backbones.layers.eager import find_switch

_kernels: dict[str, Kernel] = {}
_failures: dict[tuple[str, torch.device, torch.dtype], str] = {}
_trying = threading.Lock()


@dataclass(frozen=True)
class Kernel:
    """A Triton kernel with its trial.

    Attributes:
        name: In messages.
        results: Computes a small input on a device in a type, forward and backward, and compares.
        limits: Largest difference per type that the kernel serves in.
    """

    name: str
    results: Callable[[torch.device, torch.dtype], Iterable[Result]]
    limits: Mapping[torch.dtype, float]


def register_kernel(kernel: Kernel) -> Kernel:
    """Add a kernel to those that ``try_all`` tries and ``status`` names."""
    _kernels[kernel.name] = kernel
    return kernel


def is_installed() -> bool:
    """Return True if there are Triton and a GPU for it."""
    return torch.cuda.is_available() and find_spec("triton") is not None


def serve(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if a kernel computes in this type on this GPU."""
    key = (kernel.name, device, dtype)
    if key not in _failures:
        # A CUDA graph must not wait for a compiler: who records one makes a pass before.
        if (
            dtype not in kernel.limits
            or not is_installed()
            or find_switch()
            or torch.cuda.is_current_stream_capturing()
        ):
            return False
        with _trying:
            if key not in _failures:
                _failures[key] = _try(kernel, device, dtype)
                if _failures[key]:
                    warnings.warn(
                        f"the Triton kernel {kernel.name} does not serve on {device} in {dtype}, "
                        f"torch's own operations do: {_failures[key]}",
                        stacklevel=3,
                    )
    return not _failures[key]


def try_all(device: torch.device) -> dict[tuple[str, torch.dtype], str]:
    """Try all kernels on a GPU in all types; return why each fails, empty if it serves."""
    for kernel in _kernels.values():
        for dtype in kernel.limits:
            serve(kernel, device, dtype)
    return {(name, dtype): why for (name, at, dtype), why in _failures.items() if at == device}


def status() -> str:
    """Return what a status line adds about a GPU, if there is one."""
    if not torch.cuda.is_available() or not _kernels:
        return ""
    if find_spec("triton") is None:
        return "; on CUDA torch's own operations (there is no Triton for this torch)"
    failed = [
        f"without {name} on {device} in {dtype}: {why}"
        for (name, device, dtype), why in _failures.items()
        if why
    ]
    return "; ".join([f"; on CUDA Triton kernels ({', '.join(_kernels)})", *failed])


def _try(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> str:
    """Return why a kernel fails its trial, or an empty string."""
    try:
        with (
            torch.cuda.device(device),
            torch.inference_mode(False),
            torch.autocast(device.type, enabled=False),
        ):
            difference = largest_difference(kernel.results(device, dtype))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of whatever kind: a compiler, a driver, a GPU too old
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return "" if difference.share <= kernel.limits[dtype] else str(difference)
