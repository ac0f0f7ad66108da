"""Try the Triton kernels on a device, and put them behind two operators' names.

Before the first use on a device the kernels compute a small map in either direction, beside torch's
own operations. Where they cannot be compiled or launched, or give other numbers, one warning says
so and torch's operations serve: no network fails because of a kernel.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from functools import cache, wraps
from importlib.util import find_spec
from typing import Any

import torch
from torch.library import Library

from backbones.fast import trial
from backbones.fast.triton import operators

# Served types, and how far outputs and gradients may lie from float64's in the trial.
DTYPES = {torch.float32: 0.02, torch.bfloat16: 0.1, torch.float16: 0.02, torch.float64: 1e-9}
_libraries: list[Library] = []  # what they register lasts as long as they do
_failures: dict[tuple[torch.device, torch.dtype], str] = {}
_preparing = threading.Lock()  # a second definition of an operator would fail


def is_installed() -> bool:
    """Return True if there are Triton and a GPU for it."""
    return torch.cuda.is_available() and find_spec("triton") is not None


def serve(device: torch.device, dtype: torch.dtype, is_defined: bool) -> bool:
    """Return True if the kernels compute in this type on this device.

    Args:
        device: A GPU.
        dtype: Of what the matrix products read.
        is_defined: True if the compiled library has defined the operators.
    """
    key = (device, dtype)
    if key not in _failures:
        if dtype not in DTYPES or not is_installed():
            return False
        if torch.cuda.is_current_stream_capturing():
            # A graph must not wait for a compiler: who records one makes a pass before, as
            # torch's own instructions for graphs have it.
            return False
        with _preparing:
            _try_once(device, dtype, is_defined)
    return not _failures[key]


def _try_once(device: torch.device, dtype: torch.dtype, is_defined: bool) -> None:
    """Try the kernels unless another thread has; warn where they fail."""
    key = (device, dtype)
    if key in _failures:
        return
    _failures[key] = _prepare(device, dtype, is_defined)
    if _failures[key]:
        warnings.warn(
            f"the Triton kernels for mixers do not serve on {device} in {dtype}, torch's own "
            f"operations do: {_failures[key]}",
            stacklevel=4,
        )


def status() -> str:
    """Return what a status line adds about a GPU, if there is one."""
    if not torch.cuda.is_available():
        return ""
    if find_spec("triton") is None:
        return "; on CUDA torch's own operations (there is no Triton for this torch)"
    failed = [f"{device} in {dtype}: {why}" for (device, dtype), why in _failures.items() if why]
    if failed:
        return f"; on CUDA torch's own operations ({'; '.join(failed)})"
    return "; on CUDA Triton kernels, in eager passes"


@cache
def implement(key: str) -> None:
    """Make the kernels AFBO's and IFFN's operators for a dispatch key, such as CUDA."""
    from backbones.fast.triton import branched, gated

    library = Library("mixerlab", "IMPL")
    _libraries.append(library)
    for name, module in (("gated_mixer", gated), ("branched_mixer", branched)):
        library.impl(name, _on_its_device(module.forward), key)
        library.impl(f"{name}_backward", _on_its_device(module.backward), key)


def _on_its_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Launch on the device of the first tensor: Triton itself takes the current one."""

    @wraps(function)
    def call(first: torch.Tensor, *rest: Any) -> Any:
        if first.is_cuda:
            with torch.cuda.device(first.device):
                return function(first, *rest)
        return function(first, *rest)

    return call


@cache
def _define() -> None:
    operators.define()


def forms() -> trial.Forms:
    """Return the kernels themselves, whichever the operators' names stand for."""
    from backbones.fast.triton import branched, gated

    return trial.Forms(gated.forward, gated.backward, branched.forward, branched.backward)


def _prepare(device: torch.device, dtype: torch.dtype, is_defined: bool) -> str:
    """Define what is missing and try the kernels; return why they fail, or an empty string."""
    try:
        if not is_defined:
            _define()
        implement("CUDA")
        with torch.cuda.device(device):
            found = trial.difference(forms(), device, dtype)
        if not found <= DTYPES[dtype]:
            return f"their numbers differ by {found:.1e}"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of whatever kind: a compiler, a driver, a GPU too old
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return ""
