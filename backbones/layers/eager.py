"""Detect compilers, tracers and fake tensors, and switch fast forms off in one thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

# The dispatch modes of make_fx, which records, and of FakeTensorMode, which computes shapes only.
MODES = (torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FAKE)
# Per thread, since other threads may be computing with the fast forms.
is_switched_off = ContextVar("is_switched_off", default=False)


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
