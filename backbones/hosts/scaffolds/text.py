"""Mixers on padded sequences: padding changes no real token, and causal networks look back only.

A sequence (B, L, C) is a map of one row. Mixers are built for one row, with 1 x k kernels. Before
each such kernel the padded tokens are set to zero; for causal networks its zeros are all at the
left, so that no token sees a later one. Mixers that read padding in another way, such as attention,
mix the texts of each length apart from the others.

Axes: B sequences, L tokens, C channels, k length of a kernel.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.mixer import Mixer, class_name
from backbones.options import keywords
from backbones.registry import find_mixer, list_mixers
from backbones.slots import Slot

REAL: ContextVar[Tensor | None] = ContextVar("REAL", default=None)
TEXTS, TRIED = 4, 24  # texts of a trial and their tokens
REAL_TRIED = (2, 5)  # those that are not padding; experts fill up in short texts
Kind = Literal["channel", "token"]
LISTED_DIM = 64  # width of the mixers that a message lists


@contextlib.contextmanager
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

    def __call__(self, conv: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Zero the padded tokens, and add zeros before the row."""
        x, mask = inputs[0], REAL.get()
        last = x.shape[1] == 1  # (B, 1, L, C), else (B, C, 1, L)
        # A mixer that has changed the number of tokens is found by its trial.
        if mask is not None and mask.shape[1] == x.shape[2 if last else 3]:
            x = x * (mask[:, None, :, None] if last else mask[:, None, None, :]).to(x.dtype)
        if self.before:
            x = F.pad(x, (0, 0, self.before, 0) if last else (self.before, 0))
        return (x, *inputs[1:])


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


def fit_to_texts(mixer: Mixer, kind: Kind, dim: int, causal: bool) -> bool:
    """Fit a mixer to padded texts; return True if it must mix them by ``mix_by_length``.

    A trial mixes random tokens with padding and without, by perturbed weights: those of an
    initialised mixer may be zero.

    Args:
        mixer: The mixer, built for one row.
        kind: "token" or "channel".
        dim: C.
        causal: The network is causal.

    Raises:
        ValueError: The mixer cannot run on a row, or reads later tokens in a causal network.
    """
    fit_to_sequences(mixer, causal)
    if next(mixer.parameters(), torch.empty(0)).is_meta:
        return False  # networks without weights are counted only
    try:
        fits = _ignores_padding(mixer, dim, causal)
    except RuntimeError as error:
        raise ValueError(f"{class_name(mixer)} cannot mix a row of tokens: {error}") from error
    if fits or not causal:
        return not fits
    raise ValueError(
        f"{class_name(mixer)} reads later tokens, so it does not fit this causal network; pass one "
        f"of {', '.join(list_causal(kind))}"
    )


def list_causal(kind: Kind) -> list[str]:
    """Return the names of the mixers that fit causal networks, found by trials of all."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(action="ignore"):
        return [
            name
            for name in list_mixers(kind)
            if all(_looks_back(name, block) for block in (0, 1))  # some alternate their direction
        ]


def _looks_back(name: str, block: int) -> bool:
    build = find_mixer(name).build
    slot = Slot(LISTED_DIM, 4.0, (1, TRIED), 0, block, dense=False)
    arguments = {"slot": slot, "grid": slot.grid}
    mixer = build(slot.dim, **{key: arguments[key] for key in arguments.keys() & keywords(build)})
    mixer.built_for = slot.grid
    mixer.narrow()
    fit_to_sequences(mixer, causal=True)
    try:
        return _ignores_padding(mixer, LISTED_DIM, causal=True)
    except RuntimeError:
        return False


def _ignores_padding(mixer: nn.Module, dim: int, causal: bool) -> bool:
    """Return True if real tokens are independent of padding, or of later tokens if ``causal``."""
    device = next((p.device for p in mixer.parameters()), torch.device("cpu"))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        # In double precision, as the dependence may be weak.
        tried = copy.deepcopy(mixer).eval().double()
        for parameter in tried.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        x = torch.randn(TEXTS, 1, TRIED, dim, device=device, dtype=torch.double)
        for real in REAL_TRIED:
            mask = torch.ones(TEXTS, TRIED, dtype=torch.bool, device=device)
            mask[:, real:] = causal  # later tokens are real where only their order protects
            with real_tokens(mask):
                padded = tried(x)[:, :, :real]
            unpadded = tried(x[:, :, :real])
            if not torch.allclose(padded, unpadded, rtol=1e-7, atol=1e-8):
                return False
    return True


def mix_by_length(mixer: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
    """Mix the texts of each length in a row of their own, without padding.

    Any mixer ignores padding in this way, for one call per length in the batch.

    Args:
        mixer: Of maps (B, 1, L, C).
        x: Texts (B, L, C).
        mask: True for real tokens (B, L), which come first.

    Returns:
        (B, L, C), with zeros in the padding.
    """
    lengths = mask.sum(1)
    parts, order = [], []
    with real_tokens(None):
        for length in lengths.unique().tolist():
            rows = (lengths == length).nonzero().squeeze(1)
            mixed = mixer(x[rows, :length].unsqueeze(1)).squeeze(1)
            parts.append(F.pad(mixed, (0, 0, 0, x.shape[1] - length)))
            order.append(rows)
    return torch.cat(parts)[torch.cat(order).argsort()]
