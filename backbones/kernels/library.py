"""Loads the compiled operators, once, and says whether they or the Triton kernels serve."""

from __future__ import annotations

import functools
import os
import threading
from pathlib import Path

import torch
from torch import Tensor

from backbones.kernels import (
    batched,
    branched_mixer,
    conv_pos_enc,
    gated_mixer,
    linear,
    normalise,
    star_mixer,
    triton_choice,
)
from backbones.kernels.autocast import product_dtype
from backbones.kernels.fingerprint import MISSING, compiled_file, find_fault, operator_names
from backbones.layers.eager import are_ordinary, is_eager, is_switched_off

SWITCH = "MIXERLAB_KERNELS"
_loading = threading.Lock()
OPERATORS = (gated_mixer, branched_mixer, linear, batched, star_mixer, normalise, conv_pos_enc)


def _load() -> str:
    """Load the operators, once for all threads; why not, or nothing."""
    with _loading:
        return _load_once()


@functools.cache
def _load_once() -> str:
    if _switch():
        return _switch()
    faults = []
    for portable in (False, True):
        path = compiled_file(portable)
        fault = find_fault(path) or _load_file(path)
        if not fault:
            for operator in OPERATORS:
                operator.register()
            return ""
        if fault != MISSING:
            faults.append(f"{path.name} {fault}")
    what = faults[0] if faults else "not compiled for this torch and processor"
    return f"{what}; type: make install"


def _load_file(path: Path) -> str:
    """Load a library; why it does not serve, or nothing."""
    try:
        torch.ops.load_library(path)
    except OSError as error:
        return f"cannot be loaded ({str(error).splitlines()[0]})"
    lacking = [name for name in operator_names() if not hasattr(torch.ops.mixerlab, name)]
    return f"lacks the operator {lacking[0]}" if lacking else ""


def _switch() -> str:
    """Who has switched all operators off in the environment, or nothing."""
    value = os.environ.get(SWITCH, "")
    return f"switched off by {SWITCH}={value}" if value.lower() in ("off", "0", "false") else ""


def is_available() -> bool:
    """Whether the operators are compiled, fit this machine and are not switched off."""
    return not is_switched_off() and not _load()


def status() -> str:
    """One line for people: which operators are in use, on a CPU and, where there is one, a GPU."""
    if is_switched_off():
        return "torch's own operations (switched off)"
    if _load():
        text = f"torch's own operations ({_load()})"
    else:
        portable = bool(find_fault(compiled_file(portable=False)))
        own = f"products of their own ({torch.ops.mixerlab.instructions()})"
        products = own if torch.ops.mixerlab.has_tiles() else "the BLAS"
        text = f"compiled operators{', for any processor' if portable else ''}, with {products}"
    return f"{text}{'' if _switch() else triton_choice.status()}"


def multiplies(x: Tensor) -> bool:
    """Whether ``linear`` takes this tensor, and is not slower here than torch's products are."""
    return x.device.type == "cpu" and serves(x) and bool(torch.ops.mixerlab.has_tiles())


def multiplies_without_gradient(x: Tensor, *others: Tensor | None) -> bool:
    """Whether ``batched`` and ``linear_act``, which have no gradient, take these."""
    return not _is_recorded(x, *others) and _are_alike(x, *others) and multiplies(x)


def activates(x: Tensor) -> bool:
    """Whether ``act``, which has no gradient and wants values without gaps, takes this tensor."""
    return not _is_recorded(x) and x.device.type == "cpu" and serves(x) and _is_dense(x)


def encodes(x: Tensor, *weights: Tensor | None) -> bool:
    """Whether ``conv_pos_enc``, which has no gradient, takes this map and these weights."""
    is_cpu = x.device.type == "cpu" and x.ndim == 4
    return is_cpu and not _is_recorded(x, *weights) and _are_alike(x, *weights) and serves(x)


def _is_recorded(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _are_alike(x: Tensor, *others: Tensor | None) -> bool:
    return are_ordinary(*others) and all(
        o is None or (o.dtype == x.dtype and o.device == x.device) for o in others
    )


def _is_dense(x: Tensor) -> bool:
    return x.is_contiguous() or (x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last))


def serves(x: Tensor) -> bool:
    """Whether the operators take what this tensor begins.

    They do in eager passes: on a CPU in 32 or 64 bits and without autocast, on a GPU where Triton's
    kernels serve.
    """
    if not is_eager(x):
        return False
    if x.device.type == "cuda":
        return (
            not (is_switched_off() or _switch())
            and x.numel() > 0
            and triton_choice.serve(x.device, product_dtype(x), not _load())
        )
    return (
        x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.float64)
        and is_available()
        and not torch.is_autocast_enabled("cpu")
    )
