"""Gradient checkpointing: blocks store their inputs only and recompute the rest in backward.

Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016,
https://arxiv.org/abs/1604.06174.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from backbones.layers.eager import is_switched_off, switched_off
from backbones.replace import share_state


class Recomputed(nn.Module):
    """Base class of blocks that recompute their activations, placed before the block's own class.

    The second pass draws the same random numbers as the first, so drop path drops the same
    samples. It uses the plain forms if the first pass did. The running statistics of
    BatchNorm, which the first pass has updated, stay unchanged.
    """

    def forward(self, *args: Any, **options: Any) -> Any:
        """Run the block; in training, store its inputs only."""
        if not (self.training and torch.is_grad_enabled()):
            return super().forward(*args, **options)
        return checkpoint(
            super().forward,
            *args,
            use_reentrant=False,
            context_fn=lambda: (contextlib.nullcontext(), SecondPass(self)),
            **options,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # The class is created at run time, so unpickling creates it again.
        return _bare, (type(self).__bases__[1],), self.__dict__


def recompute(block: nn.Module) -> nn.Module:
    """Return a block with the same state that recomputes its activations in the backward pass."""
    if isinstance(block, Recomputed):
        return block
    kind: Any = type(block)
    return share_state(block, _recomputed_class(kind))


def keep_activations(block: nn.Module) -> nn.Module:
    """Return a block with the same state that stores its activations: undo ``recompute``."""
    return share_state(block, type(block).__bases__[1]) if isinstance(block, Recomputed) else block


class SecondPass:
    """Context of a block's second pass, entered in every backward pass."""

    def __init__(self, block: nn.Module) -> None:
        self._block, self._uses_plain_forms = block, is_switched_off.get()
        self._entered = contextlib.ExitStack()

    def __enter__(self) -> None:
        self._entered.enter_context(freeze_running_statistics(self._block))
        if self._uses_plain_forms:
            self._entered.enter_context(switched_off())

    def __exit__(self, *error: object) -> None:
        self._entered.close()


@contextlib.contextmanager
def freeze_running_statistics(block: nn.Module) -> Iterator[None]:
    """Freeze the running statistics of every BatchNorm, while it normalises as usual."""
    norms = [m for m in block.modules() if isinstance(m, _BatchNorm) and m.training]
    before = [(norm.momentum, _copy(norm.num_batches_tracked)) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0  # the weight of the batch in the average
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(norms, before, strict=True):
            norm.momentum = momentum
            if norm.num_batches_tracked is not None and count is not None:
                norm.num_batches_tracked.copy_(count)


def _copy(count: Tensor | None) -> Tensor | None:
    return None if count is None else count.clone()


@functools.cache
def _recomputed_class(block: Any) -> type[nn.Module]:
    attributes = {"__module__": __name__, "__doc__": block.__doc__}
    return type(f"Recomputed{block.__name__}", (Recomputed, block), attributes)


def _bare(block: Any) -> nn.Module:
    kind = _recomputed_class(block)
    return kind.__new__(kind)
