"""Load the compiled operators once, and describe which ones are in use."""

from __future__ import annotations

import functools
import threading
from pathlib import Path

import torch

from backbones.fast.fingerprint import MISSING, compiled_file, find_fault, operator_names
from backbones.layers.eager import find_switch, is_switched_off

_loading = threading.Lock()


@functools.cache
def load() -> str:
    """Load the operators; return why they cannot be used, or an empty string."""
    with _loading:
        return _load_once()


@functools.cache
def _load_once() -> str:
    if find_switch():
        return find_switch()
    faults = []
    for portable in (False, True):
        path = compiled_file(portable)
        fault = find_fault(path) or _load_file(path)
        if not fault:
            return ""
        if fault != MISSING:
            faults.append(f"{path.name} {fault}")
    reason = faults[0] if faults else "not compiled for this torch and processor"
    is_checkout = (Path(__file__).parents[2] / "Makefile").exists()
    return f"{reason}; {'type: make install' if is_checkout else 'a checkout compiles them'}"


def _load_file(path: Path) -> str:
    """Load a library; return why it cannot be used, or an empty string."""
    try:
        torch.ops.load_library(path)
    except OSError as error:
        return f"cannot be loaded ({str(error).splitlines()[0]})"
    lacking = [name for name in operator_names() if not hasattr(torch.ops.mixerlab, name)]
    return f"lacks the operator {lacking[0]}" if lacking else ""


def is_available() -> bool:
    """Return True if the operators are compiled, fit this machine and are switched on."""
    return not is_switched_off.get() and not load()


def status() -> str:
    """Describe in one line the operators in use, on the CPU and on a GPU if there is one."""
    from backbones.fast.triton import choice

    if is_switched_off.get():
        return "torch's own operations (switched off)"
    if load():
        text = f"torch's own operations ({load()})"
    else:
        portable = bool(find_fault(compiled_file(portable=False)))
        products_words = f"products of their own ({torch.ops.mixerlab.instructions()})"
        products = products_words if has_tiles() else "the BLAS"
        text = f"compiled operators{', for any processor' if portable else ''}, with {products}"
    return f"{text}{'' if find_switch() else choice.status()}"


@functools.cache
def has_tiles() -> bool:
    """Return True if the operators multiply by their own tiles, which are as fast as torch's."""
    return not load() and bool(torch.ops.mixerlab.has_tiles())
