"""Channel mappings, each token by itself: (..., C) -> (..., h).

Figure 2 of AFBO (Wu et al., ICLR 2025) shows them as matrices: (a) dense, (b) block-diagonal, (c)
grouped cross (GCCM), (d) overlapped cycle (OCCM). ``dense_weight`` gives that matrix.

Axes: C = d input channels, h hidden channels, G groups, which are runs of neighbouring channels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.bounds import check_divisor, check_range

Pairing = Literal["anti", "cyclic"]


class MatrixBlock(NamedTuple):
    """One run of output channels: a weight, by its number, times input columns from ``start`` on.

    Several blocks may share a weight.
    """

    weight: int
    start: int


class ChannelMapping(nn.Module, ABC):
    """Base class of all mappings: widths, an optional bias (h,) and the equivalent matrix."""

    dim: int
    hidden: int
    blocks: tuple[MatrixBlock, ...]
    bias: nn.Parameter | None

    @abstractmethod
    def dense_weight(self) -> Tensor:
        """Return the mapping as one (h, C) matrix."""

    @abstractmethod
    def as_blocks(self) -> tuple[Sequence[Tensor], Sequence[MatrixBlock]]:
        """Return weights and blocks whose rows are the outputs; input columns wrap around."""

    def reset_parameters(self, std: float | None = None) -> None:
        """Draw a truncated normal of ``std``, or of 1 / sqrt(columns per row); zero the bias."""
        for name, parameter in self.named_parameters():
            if name != "bias":
                nn.init.trunc_normal_(parameter, std=std or parameter.shape[-1] ** -0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def leave_out_bias(self) -> None:
        """Remove the bias b."""
        self.register_parameter("bias", None)


class DenseMapping(ChannelMapping):
    """Every output reads every input. Parameters: C h + h. Source: AFBO, Eq. 4, Fig. 2a."""

    blocks = (MatrixBlock(0, 0),)

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.dim, self.hidden = dim, hidden
        self.weight = nn.Parameter(torch.empty(hidden, dim))
        self.bias = nn.Parameter(torch.empty(hidden))
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Return W x + b: (..., C) -> (..., h)."""
        return F.linear(x, self.weight, self.bias)

    def as_blocks(self) -> tuple[Sequence[Tensor], Sequence[MatrixBlock]]:
        """Return one block."""
        return [self.weight], self.blocks

    def dense_weight(self) -> Tensor:
        """Return the (h, C) matrix."""
        return self.weight


class GroupedCrossMapping(ChannelMapping):
    """GCCM: block s * G + w of the outputs is W[w] applied to input group i(s, w).

    Parameters: C h / (rounds G) + h. With two rounds that is the 1 / 2G of the text, with G rounds
    the 1 / G^2 of Sec. 3.3. For odd G "anti" gives the middle weight the same group twice, so that
    two output blocks differ by their biases only; "cyclic" does not.

    Args:
        dim: Input channels C, a multiple of G.
        hidden: Output channels h, a multiple of G * rounds.
        groups: G.
        rounds: Blocks that share one weight.
        pairing: "anti": i(0, w) = w, i(1, w) = G - 1 - w. "cyclic": i(s, w) = (w + s) mod G.

    Shape: (..., C) -> (..., h).

    Raises:
        ValueError: Widths that G does not divide, or more rounds than the pairing has.

    Source: AFBO, Eq. 6, Fig. 2c.
    """

    def __init__(
        self, dim: int, hidden: int, groups: int, rounds: int = 2, pairing: Pairing = "anti"
    ) -> None:
        super().__init__()
        check_range("rounds", rounds, 1, 2 if pairing == "anti" else groups)
        check_divisor("g1", groups, dim, hidden)
        check_divisor("g1 * rounds", groups * rounds, hidden)
        self.dim, self.hidden, self.pairing = dim, hidden, pairing
        self.blocks = tuple(
            MatrixBlock(w, _source(s, w, groups, pairing) * (dim // groups))
            for s in range(rounds)
            for w in range(groups)
        )
        self.weight = nn.Parameter(torch.empty(groups, hidden // (groups * rounds), dim // groups))
        self.bias = nn.Parameter(torch.empty(hidden))
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Multiply each weight with ``rounds`` groups and add b, Eq. 6: (..., C) -> (..., h)."""
        return _block_products(x, *self.as_blocks(), self.bias)

    def as_blocks(self) -> tuple[Sequence[Tensor], Sequence[MatrixBlock]]:
        """Return each weight, in ``rounds`` blocks."""
        return self.weight.unbind(), self.blocks

    def dense_weight(self) -> Tensor:
        """Return the (h, C) matrix, with zeros where an output skips an input."""
        # In few operations, as a GPU takes longer to start one than to compute it.
        diagonal = torch.diag_embed(self.weight.permute(1, 2, 0), dim1=0, dim2=2)
        later = (
            diagonal.flip(2) if self.pairing == "anti" else diagonal.roll(s, dims=2)
            for s in range(1, len(self.blocks) // len(self.weight))
        )
        return torch.cat([diagonal, *later]).flatten(2).flatten(0, 1)


class BlockDiagonalMapping(GroupedCrossMapping):
    """Group g of the outputs reads group g of the inputs: GCCM's first round alone.

    Parameters: C h / G + h. Source: AFBO, Eq. 5, Fig. 2b.
    """

    def __init__(self, dim: int, hidden: int, groups: int) -> None:
        super().__init__(dim, hidden, groups, rounds=1)


class OverlappedCycleMapping(ChannelMapping):
    """OCCM: output run g is W[g] applied to input runs g, g + 1, ..., g + K - 1, cyclically.

    Widths that G does not divide are cut into runs that differ by at most one channel, longer ones
    first (the paper uses G = 3 on widths of 64, 128, 320 and 512). Parameters: about C h K / G + h.

    Args:
        dim: Input channels C.
        hidden: Output channels h.
        groups: G.
        window: K, groups read by each output run; G - 1 (at least 1) by default.

    Shape: (..., C) -> (..., h).

    Raises:
        ValueError: More groups than channels, or a window larger than G.

    Source: AFBO, Eq. 7, Fig. 2d, with K = G - 1 from Sec. 3.3.
    """

    def __init__(self, dim: int, hidden: int, groups: int, window: int | None = None) -> None:
        super().__init__()
        check_range("g2", groups, 1, min(dim, hidden))
        window = max(1, groups - 1) if window is None else window
        check_range("window", window, 1, groups)
        runs_in, runs_out = balanced_runs(dim, groups), balanced_runs(hidden, groups)
        self.dim, self.hidden = dim, hidden
        self.wrapped = sum(runs_in[: window - 1])  # channels read again after the last one
        starts = [0, *accumulate(runs_in)][:-1]
        self.blocks = tuple(MatrixBlock(g, start) for g, start in enumerate(starts))
        widths = [sum((runs_in * 2)[g : g + window]) for g in range(groups)]
        self.weights = nn.ParameterList(
            torch.empty(rows, width) for rows, width in zip(runs_out, widths, strict=True)
        )
        self.bias = nn.Parameter(torch.empty(hidden))
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Multiply each weight with a cyclic run of groups, plus b, Eq. 7: (..., C) -> (..., h)."""
        if self.wrapped:
            x = torch.cat([x, x[..., : self.wrapped]], dim=-1)
        return _block_products(x, *self.as_blocks(), self.bias)

    def as_blocks(self) -> tuple[Sequence[Tensor], Sequence[MatrixBlock]]:
        """Return a weight per group; the last ones wrap around."""
        # By name: a list of parameters takes 20 microseconds to iterate over.
        return [getattr(self.weights, str(i)) for i in range(len(self.blocks))], self.blocks

    def dense_weight(self) -> Tensor:
        """Return the (h, C) matrix, with zeros where an output skips an input."""
        groups = len(self.blocks)
        if self.dim % groups == 0 and self.hidden % groups == 0:
            return _shifted(torch.stack([*self.weights]).unflatten(2, (-1, self.dim // groups)))
        rows = []
        for block, weight in zip(self.blocks, self.weights, strict=True):
            padded = F.pad(weight, (0, self.dim - weight.shape[1]))
            rows.append(padded.roll(block.start, dims=1))
        return torch.cat(rows)


def _shifted(weights: Tensor) -> Tensor:
    """Return OCCM's matrix of weights (G, h / G, K, C / G): those of group g begin at run g."""
    groups, _, window, _ = weights.shape
    weights = weights.permute(1, 3, 0, 2)
    gap = weights.new_zeros(*weights.shape[:3], groups - window)
    # Each row is read twice, from a place that moves back by one from row to row.
    rows = torch.cat([weights, gap, weights, gap], dim=3).flatten(2)[..., groups:]
    shifted = rows.unflatten(2, (groups, -1))[..., :groups]
    return shifted.permute(2, 0, 3, 1).flatten(2).flatten(0, 1)


def balanced_runs(width: int, groups: int) -> list[int]:
    """Return lengths of ``groups`` runs of channels that differ by at most one, longer first."""
    shorter, longer = divmod(width, groups)
    return [shorter + 1] * longer + [shorter] * (groups - longer)


def _block_products(
    x: Tensor, weights: Sequence[Tensor], blocks: Sequence[MatrixBlock], bias: Tensor | None
) -> Tensor:
    """Multiply each weight with its columns of x and concatenate: (..., C) -> (..., h)."""
    pieces = []
    for index, start in blocks:
        weight = weights[index]
        pieces.append(F.linear(x[..., start : start + weight.shape[1]], weight))
    product = torch.cat(pieces, dim=-1)
    return product if bias is None else product + bias


def _source(round_: int, weight: int, groups: int, pairing: Pairing) -> int:
    if pairing == "cyclic":
        return (weight + round_) % groups
    return weight if round_ == 0 else groups - 1 - weight
