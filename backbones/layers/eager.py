"""Who computes here: torch eagerly, on ordinary tensors, or somebody who wants to see operations.

Forms that write in place or call an operator of our own serve an eager pass only; a compiler, a
transformation of ``torch.func`` or a tensor of another class gets the operations of the formula.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as calls
from torch.utils._python_dispatch import _get_current_dispatch_mode

# What make_fx records with, and what computes shapes without values.
MODES = (torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FAKE)
BATCHES = ("Batched", "FuncTorchBatched")  # torch's names of how it batches calls
# Quantised, sharded or faked ones bring their own idea of an operation.
ORDINARY = frozenset({Tensor, nn.Parameter})
# Of each thread: what one switches off the others may be computing with.
_switched_off = ContextVar("switched_off", default=False)


def is_eager(*tensors: Tensor | None) -> bool:
    """Whether nobody records or transforms, and these tensors are torch's own."""
    return not (in_graph() or is_transformed()) and are_ordinary(*tensors)


def are_ordinary(*tensors: Tensor | None) -> bool:
    """Whether these are tensors of torch's own classes."""
    return all(tensor is None or type(tensor) in ORDINARY for tensor in tensors)


def is_batched(tensor: Tensor) -> bool:
    """Whether it stands for a batch: of gradients, where a whole Jacobian is asked for."""
    keys = torch._C._dispatch_keys(tensor)
    return any(keys.has(key) for key in BATCHES)


def in_graph() -> bool:
    """Whether a compiler or tracer records, or shapes are asked for; these shall see operations."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return True
    return any(torch._C._get_dispatch_mode(mode) is not None for mode in MODES)


def is_watched() -> bool:
    """Return True if a mode sees every operation, such as a counter of multiply-adds."""
    return _get_current_dispatch_mode() is not None


def is_transformed() -> bool:
    """Whether ``torch.func`` is at work, or derivatives are taken forwards."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
    )


def has_global_hooks() -> bool:
    """Whether somebody waits for the call of any module there is."""
    return bool(
        calls._global_forward_hooks
        or calls._global_forward_pre_hooks
        or calls._global_backward_hooks
        or calls._global_backward_pre_hooks
    )


def is_switched_off() -> bool:
    """Whether this thread computes by torch's own operations for the time being."""
    return _switched_off.get()


@contextmanager
def switched_off() -> Iterator[None]:
    """Compute by torch's own operations in this thread, for gradients of gradients, say."""
    token = _switched_off.set(True)
    try:
        yield
    finally:
        _switched_off.reset(token)
