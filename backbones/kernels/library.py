"""Loads the compiled operators, once, and says whether they serve."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from backbones.kernels import branched_mixer, gated_mixer
from backbones.kernels.fingerprint import compiled_file
from backbones.layers.eval_cache import in_graph

SWITCH = "MIXERLAB_KERNELS"
_switched_off = False


@functools.cache
def _load() -> str:
    """Load the operators; why not, or nothing."""
    if os.environ.get(SWITCH, "").lower() in ("off", "0", "false"):
        return f"switched off by {SWITCH}={os.environ[SWITCH]}"
    for portable in (False, True):
        path = compiled_file(portable)
        if path.exists():
            try:
                torch.ops.load_library(path)
            except OSError as error:
                return f"{path.name} cannot be loaded ({str(error).splitlines()[0]})"
            for operator in (gated_mixer, branched_mixer):
                operator.register()
            return ""
    return "not compiled for this torch and processor; type: make install"


def is_available() -> bool:
    """Whether the operators are compiled, fit this machine and are not switched off."""
    return not _switched_off and not _load()


def status() -> str:
    """One line for people: which operators are in use."""
    if _load():
        return f"torch's own operations ({_load()})"
    if _switched_off:
        return "torch's own operations (switched off)"
    portable = not compiled_file(portable=False).exists()
    products = "products of their own (AVX-512)" if torch.ops.mixerlab.has_tiles() else "the BLAS"
    return f"compiled operators{', for any processor' if portable else ''}, with {products}"


@contextmanager
def switched_off() -> Iterator[None]:
    """Compute by torch's own operations, for gradients of gradients, say, or to compare."""
    global _switched_off
    before, _switched_off = _switched_off, True
    try:
        yield
    finally:
        _switched_off = before


def serves(x: Tensor) -> bool:
    """Whether the operators take what this tensor begins: eager, on a CPU, in 32 or 64 bits."""
    return (
        not in_graph()
        and x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.float64)
        and is_available()
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._functorch.peek_interpreter_stack()
    )
