"""Mixers on padded sequences: kernels along a row of tokens that skip padding or look back only.

A sequence (B, L, C) is a map of one row. Mixers are built for one row, with 1 x k kernels. Before
each such kernel the padded tokens are set to zero; for causal networks its zeros are all at the
left, so that no token sees a later one.

Axes: B sequences, L tokens, C channels, k length of a kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.base import Mixer, class_name

REAL: ContextVar[Tensor | None] = ContextVar("REAL", default=None)
TRIED, REAL_TRIED = 8, 5  # tokens of a trial, and those that are not padding


@contextmanager
def real_tokens(mask: Tensor | None) -> Iterator[None]:
    """Tell the kernels within the context which tokens are real: (B, L), or None for all."""
    token = REAL.set(mask)
    try:
        yield
    finally:
        REAL.reset(token)


class RowInput:
    """Forward pre-hook of a convolution with a 1 x k kernel.

    Args:
        before: Zeros to add before the first token.
    """

    def __init__(self, before: int) -> None:
        self.before = before

    def __call__(self, conv: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """Zero the padded tokens, and add zeros before the row."""
        x, mask = given[0], REAL.get()
        last = x.shape[1] == 1  # (B, 1, L, C), else (B, C, 1, L)
        if mask is not None:
            x = x * (mask[:, None, :, None] if last else mask[:, None, None, :]).to(x.dtype)
        if self.before:
            x = F.pad(x, (0, 0, self.before, 0) if last else (self.before, 0))
        return (x, *given[1:])


def fit_to_sequences(mixer: nn.Module, causal: bool) -> None:
    """Let the row kernels of a mixer skip padding, and with ``causal`` look back only."""
    for part in mixer.modules():
        if not isinstance(part, nn.Conv2d) or part.kernel_size[1] == 1:
            continue
        before = 0
        if causal and part.stride == (1, 1) and part.padding != "same":
            before = part.dilation[1] * (part.kernel_size[1] - 1)
            part.padding, part._reversed_padding_repeated_twice = (0, 0), [0, 0, 0, 0]
        part.register_forward_pre_hook(RowInput(before))


def check_sequences(mixer: Mixer, dim: int, causal: bool) -> None:
    """Refuse a mixer that lets real tokens depend on padding, or on later tokens if ``causal``.

    It mixes random tokens twice, with other ones in the padding.

    Raises:
        ValueError: The outputs of real tokens differ, or the mixer cannot run on a row.
    """
    if next(mixer.parameters(), torch.empty(0)).is_meta:
        return
    training = mixer.training
    device = next((p.device for p in mixer.parameters()), torch.device("cpu"))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        one = torch.randn(2, 1, TRIED, dim, device=device)
        other = one.clone()
        other[:, :, REAL_TRIED:] = torch.randn_like(other[:, :, REAL_TRIED:])
        mask = torch.ones(2, TRIED, dtype=torch.bool, device=device)
        mask[:, REAL_TRIED:] = causal  # later tokens are real where only their order protects
        mixer.eval()
        try:
            with real_tokens(mask):
                first, second = (mixer(x)[:, :, :REAL_TRIED] for x in (one, other))
        finally:
            mixer.train(training)
    if not torch.allclose(first, second, rtol=1e-4, atol=1e-5):
        what = "later tokens" if causal else "padding"
        raise ValueError(
            f"{class_name(mixer)} reads {what}, so it does not fit this text network; use a mixer "
            "of single tokens or with depthwise convolutions, such as glu or afbo"
        )
