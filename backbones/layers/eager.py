"""Detect compilers, tracers and fake tensors, and switch fast forms off."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

# The dispatch modes of make_fx, which records, and of FakeTensorMode, which computes shapes only.
MODES = (torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FAKE)
# Per thread, since other threads may be computing with the fast forms.
is_switched_off = ContextVar("is_switched_off", default=False)
SWITCH = "MIXERLAB_KERNELS"  # of the environment


def find_switch() -> str:
    """Return the environment's setting that switches all operators off, or an empty string."""
    value = os.environ.get(SWITCH, "")
    return f"switched off by {SWITCH}={value}" if value.lower() in ("off", "0", "false") else ""


def is_recording() -> bool:
    """Return True under a compiler or tracer, or where only shapes are computed."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return True
    return any(torch._C._get_dispatch_mode(mode) is not None for mode in MODES)


@contextmanager
def switched_off() -> Iterator[None]:
    """Compute by the plain forms in this thread, for example for gradients of gradients."""
    token = is_switched_off.set(True)
    try:
        yield
    finally:
        is_switched_off.reset(token)
