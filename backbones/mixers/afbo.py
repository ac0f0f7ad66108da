"""AFBO: an asymmetric factorized bilinear operation in place of the feed-forward network.

    a = DW_a(OCCM(x)),  b = DW_b(GCCM(x)),  y = W3 (SiLU(a) * b) + b3

Source: Wu et al., "Asymmetric Factorized Bilinear Operation for Vision Transformer", ICLR 2025,
Eq. 4, 6, 7, Fig. 1 and 2. The authors published no code. Where the paper leaves a choice or
contradicts itself:

* Eq. 7 draws windows of two groups, while Sec. 3.3, Table 1 and Table 7 count G - 1 groups. G - 1
  is taken: with it the parameters of 13 DeiT-T rows and 17 host rows come within 0.16 M (RMSE) of
  the paper, with two groups within 0.73 M, and only then do they grow with G2 as Table 7 does.
* Sec. 4.1 gives (G1, G2) = (2, 3) to all hosts, App. A.1 only to LVT, Swin and the MLPs. (2, 4) can
  only add parameters, and Table 2 reports fewer for DeiT-S and DeiT-B, so these two are (2, 3) as
  well.
* GCCM stores each weight once and applies it ``rounds`` times: sharing saves memory, not
  arithmetic. The paper's 1/G1^2 FLOPs (Sec. 3.3, Table 1) count it once.
* Table 2 reports Swin-S 1.35 M and Swin-B 1.78 M below what any reading of the text gives.
* Nothing is said of class tokens: they pass both mappings, the product and W3, and skip the
  convolutions. Nothing is said of initialisation either, see ``reset_parameters``.

Axes: C = d input channels, h = M d hidden channels; a group is a run of neighbouring channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp.autocast_mode import is_autocast_available

from backbones.base import Mixer, hidden_width
from backbones.layouts import to_nchw, to_nhwc
from backbones.registry import register_mixer

PAIRINGS = ("anti", "cyclic")


@register_mixer(
    "afbo",
    kind="channel",
    source="AFBO (ICLR 2025), Eq. 4 with Eq. 7 on the activated branch and Eq. 6 on the other",
    host_options={"deit_[sb]": {"g2": 3}, "swin_*": {"g2": 3}},
    published_on=("deit_*", "swin_*", "poolformer_*"),
)
class AFBO(Mixer):
    """W3 (SiLU(DW_a(OCCM(x))) * DW_b(GCCM(x))) + b3, without any norm inside.

    Args:
        dim: Channels C.
        hidden_ratio: M, hidden width over C.
        g1: Groups of GCCM.
        g2: Groups of OCCM.
        window: Groups that each output group of OCCM reads; g2 - 1 (at least 1) by default.
        rounds: How often GCCM applies each of its weights, to another group each time.
        pairing: Which group GCCM reads in round s with weight w: "anti" (Eq. 6) reads G - 1 - w in
            the second round, "cyclic" reads (w + s) mod G.
        kernel_size: Side of the depthwise convolutions, odd.
        drop: Dropout after the product and after W3.

    Shape: (B, H, W, C) -> (B, H, W, C). Parameters:
        C h (1 / (rounds g1) + window / g2 + 1) + 2 h k^2 + 4 h + C, for widths that divide evenly.

    Raises:
        ValueError: A width that does not divide, a window larger than g2, an even kernel.
    """

    def __init__(
        self,
        dim: int,
        *,
        hidden_ratio: float = 4.0,
        g1: int = 2,
        g2: int = 4,
        window: int | None = None,
        rounds: int = 2,
        pairing: str = "anti",
        kernel_size: int = 3,
        drop: float = 0.0,
    ) -> None:
        super().__init__()
        hidden = hidden_width(dim, hidden_ratio)
        self.cm_a = OverlappedCycleMapping(dim, hidden, g2, window)
        self.cm_b = GroupedCrossMapping(dim, hidden, g1, rounds, pairing)
        self.sm_a = depthwise_conv(hidden, kernel_size)
        self.sm_b = depthwise_conv(hidden, kernel_size)
        self.proj = nn.Linear(hidden, dim)
        self.drop = nn.Dropout(drop)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start near the plain bilinear product, at a scale that lets gradients through.

        The paper is silent. With ViT's 0.02 for all weights the output would be 90 times smaller
        than an FFN's, since three factors shrink it. So: mappings 1/sqrt(fan in), depthwise kernels
        the identity plus 0.02, W3 0.02, biases 0.
        """
        for conv in (self.sm_a, self.sm_b):
            nn.init.trunc_normal_(conv.weight, std=0.02)
            centre = conv.kernel_size[0] // 2
            with torch.no_grad():
                conv.weight[:, :, centre, centre] += 1
            nn.init.zeros_(cast("Tensor", conv.bias))
        nn.init.trunc_normal_(self.proj.weight, std=0.02)
        nn.init.zeros_(self.proj.bias)

    def mix(self, x: Tensor) -> Tensor:
        """(B, H, W, C) -> (B, H, W, C)."""
        a = _convolve(self.sm_a, self.cm_a(x))
        b = _convolve(self.sm_b, self.cm_b(x))
        return self._combine(a, b)

    def mix_prefix(self, prefix: Tensor) -> Tensor:
        """(B, P, C) -> (B, P, C): everything but the convolutions."""
        return self._combine(self.cm_a(prefix), self.cm_b(prefix))

    def _combine(self, a: Tensor, b: Tensor) -> Tensor:
        product = F.silu(a) * b if torch.is_grad_enabled() else F.silu(a, inplace=True).mul_(b)
        return self.drop(self.proj(self.drop(product)))


class GroupedCrossMapping(nn.Module):
    """GCCM: block s * G + w of the outputs is W[w] applied to input group i(s, w).

    Parameters: C h / (rounds G) + h.

    Args:
        dim: Input channels C, a multiple of G.
        hidden: Output channels h, a multiple of G * rounds.
        groups: G.
        rounds: Blocks that share one weight.
        pairing: "anti": i(0, w) = w, i(1, w) = G - 1 - w. "cyclic": i(s, w) = (w + s) mod G.

    Shape: (..., C) -> (..., h).

    Source: AFBO (ICLR 2025), Eq. 6, Fig. 2c.
    """

    def __init__(
        self, dim: int, hidden: int, groups: int, rounds: int = 2, pairing: str = "anti"
    ) -> None:
        super().__init__()
        if pairing not in PAIRINGS or not 1 <= rounds <= (2 if pairing == "anti" else groups):
            raise ValueError(
                f"pairing must be one of {PAIRINGS} with rounds of 1 to 2 for 'anti' and 1 to g1 = "
                f"{groups} for 'cyclic'; got {pairing!r} with {rounds}"
            )
        valid = [g for g in range(1, dim + 1) if dim % g == 0 and hidden % (g * rounds) == 0]
        if groups not in valid:
            raise ValueError(
                f"g1 must divide the input width {dim}, and g1 * rounds the hidden width {hidden}: "
                f"g1 must be one of {valid} with {rounds} rounds, got {groups}"
            )
        self.dim, self.groups, self.rounds = dim, groups, rounds
        self.sources = [
            _source(s, w, groups, pairing) for s in range(rounds) for w in range(groups)
        ]
        self.weight = nn.Parameter(torch.empty(groups, hidden // (groups * rounds), dim // groups))
        self.bias = nn.Parameter(torch.zeros(hidden))
        nn.init.trunc_normal_(self.weight, std=(dim // groups) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., h)."""
        width, rows = self.dim // self.groups, self.weight.shape[1]
        pieces = []
        for start, end, group in _runs(self.sources):
            # Neighbouring blocks that read the same group are one product.
            blocks = [block % self.groups for block in range(start, end)]
            weight = (
                self.weight[blocks[0]] if end - start == 1 else self.weight[blocks].flatten(0, 1)
            )
            columns = x[..., group * width : (group + 1) * width]
            pieces.append((columns, weight, self.bias[start * rows : end * rows]))
        return _linear_pieces(pieces)

    def dense_weight(self) -> Tensor:
        """The same mapping as one (h, C) matrix."""
        width, rows = self.dim // self.groups, self.weight.shape[1]
        dense = self.weight.new_zeros(len(self.sources) * rows, self.dim)
        for block, group in enumerate(self.sources):
            weight = self.weight[block % self.groups]
            dense[block * rows : (block + 1) * rows, group * width : (group + 1) * width] = weight
        return dense


class OverlappedCycleMapping(nn.Module):
    """OCCM: output run g is W[g] applied to input runs g, g + 1, ..., g + K - 1, cyclically.

    Widths that G does not divide are cut into runs that differ by at most one channel, longer ones
    first (the paper uses G = 3 on widths of 64, 128, 320 and 512). Parameters: about C h K / G + h.

    Args:
        dim: Input channels C.
        hidden: Output channels h.
        groups: G.
        window: K, groups read by each output run; G - 1 (at least 1) by default.

    Shape: (..., C) -> (..., h).

    Source: AFBO (ICLR 2025), Eq. 7, Fig. 2d, with K = G - 1 from Sec. 3.3.
    """

    def __init__(self, dim: int, hidden: int, groups: int, window: int | None = None) -> None:
        super().__init__()
        if not 1 <= groups <= min(dim, hidden):
            raise ValueError(f"g2 must be from 1 to {min(dim, hidden)}, got {groups}")
        window = max(1, groups - 1) if window is None else window
        if not 1 <= window <= groups:
            raise ValueError(f"window must be from 1 to g2 = {groups}, got {window}")
        runs_in, runs_out = balanced_runs(dim, groups), balanced_runs(hidden, groups)
        self.dim = dim
        self.wrapped = sum(runs_in[: window - 1])  # channels read again after the last one
        self.starts = [0, *accumulate(runs_in)][:-1]
        self.ends_out = [0, *accumulate(runs_out)]
        widths = [sum((runs_in * 2)[g : g + window]) for g in range(groups)]
        self.weights = nn.ParameterList(
            torch.empty(rows, width) for rows, width in zip(runs_out, widths, strict=True)
        )
        self.bias = nn.Parameter(torch.zeros(hidden))
        for weight in self.weights:
            nn.init.trunc_normal_(weight, std=weight.shape[1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., h)."""
        if self.wrapped:
            x = torch.cat([x, x[..., : self.wrapped]], dim=-1)
        pieces = [
            (x[..., start : start + weight.shape[1]], weight, self.bias[first:last])
            for start, weight, (first, last) in zip(
                self.starts, self.weights, pairwise(self.ends_out), strict=True
            )
        ]
        return _linear_pieces(pieces)

    def dense_weight(self) -> Tensor:
        """The same mapping as one (h, C) matrix."""
        rows = []
        for start, weight in zip(self.starts, self.weights, strict=True):
            padded = F.pad(weight, (0, self.dim - weight.shape[1]))
            rows.append(padded.roll(start, dims=1))
        return torch.cat(rows)


def depthwise_conv(channels: int, kernel_size: int) -> nn.Conv2d:
    """A depthwise convolution that keeps the map's size."""
    if kernel_size < 1 or kernel_size % 2 == 0:
        raise ValueError(f"kernel_size must be odd (1, 3, 5, 7, ...), got {kernel_size}")
    return nn.Conv2d(channels, channels, kernel_size, padding=kernel_size // 2, groups=channels)


def balanced_runs(width: int, groups: int) -> list[int]:
    """Cut ``width`` channels into ``groups`` runs that differ by at most one, longer ones first."""
    short, longer = divmod(width, groups)
    return [short + 1] * longer + [short] * (groups - longer)


def _convolve(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """Convolve (B, H, W, h); the view as channels_last memory spares both copies."""
    return to_nhwc(conv(to_nchw(x)))


def _linear_pieces(pieces: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """Concatenate x_i W_i^T + b_i along the channels, for pieces (x_i, W_i, b_i).

    Without autograd each product is written straight into its slice, which saves a pass over the
    hidden map; autograd and autocast do not know ``out=``.
    """
    x = pieces[0][0]
    if torch.is_grad_enabled() or _is_autocast(x.device.type) or torch.compiler.is_compiling():
        return torch.cat([F.linear(*piece) for piece in pieces], dim=-1)
    hidden = sum(len(bias) for _, _, bias in pieces)
    out = x.new_empty(x.shape[:-1].numel(), hidden)
    start = 0
    for columns, weight, bias in pieces:
        flat = columns.reshape(-1, weight.shape[1])
        torch.addmm(bias, flat, weight.t(), out=out[:, start : start + len(bias)])
        start += len(bias)
    return out.unflatten(0, x.shape[:-1])


def _is_autocast(device: str) -> bool:
    """Whether autocast is on; the meta device, which only counts, does not know it."""
    return is_autocast_available(device) and torch.is_autocast_enabled(device)


def _source(round_: int, weight: int, groups: int, pairing: str) -> int:
    if pairing == "cyclic":
        return (weight + round_) % groups
    return weight if round_ == 0 else groups - 1 - weight


def _runs(sources: Sequence[int]) -> list[tuple[int, int, int]]:
    """Maximal runs of equal entries as (start, end, entry)."""
    cuts = [
        i for i in range(len(sources) + 1) if i in (0, len(sources)) or sources[i] != sources[i - 1]
    ]
    return [(start, end, sources[start]) for start, end in pairwise(cuts)]
