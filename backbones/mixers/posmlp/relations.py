"""Matrices that mix the tokens of a window: free, from a table of offsets, or from a Gaussian.

    out[m, c] = sum_n M[c mod s][m, n] u[n, c] + b[m]

Source: Wang et al., "Parameterization of Cross-Token Relations with Relative Positional Encoding
for Vision MLP" (PosMLP), MM 2022, https://doi.org/10.1145/3503161.3547953, Sec. 3.2 and 4.1. The
authors' released code is followed where the two differ:

* Channel c is of group c mod s; Eq. 12 to 14 say contiguous groups. The two are the same network up
  to the order of channels, and only the former takes the released weights by name.
* P = Gamma Gamma^T is the inverse covariance itself, where Eq. 5 and 7 invert it. Sec. 5.3 and
  App. 3 (small eigenvalues reach far) fit the code.
* The vertical displacement is row_m - row_n, the horizontal col_n - col_m; Sec. 3.2 has p_j - p_i
  for both. The sign changes only what a given Delta and Gamma mean.
* Eq. 12 leaves b out, Eq. 15 has it; it is one number per position of the window.

Axes: w window side, N = w * w tokens, token t at row t // w and column t mod w, s groups.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor, nn

from backbones.layers.bounds import check_range
from backbones.layers.precision import without_autocast
from backbones.layers.windows import Pattern, corner_of_matrix, mix_windows, visible

Sigma = Literal["gamma_gammaT", "gamma", "alpha", "alpha_as_released"]
Init = Literal["gmlp", "posmlp"]
SINGULAR = 1e-4  # share of a layer's largest eigenvalue; ours, the paper leaves it open
TINY = 1e-6  # standard deviation of a token matrix that shall start as zero


class TokenRelation(nn.Module, ABC):
    """A (s, N, N) matrix over the tokens of a window and a bias (N) over its positions.

    Args:
        window: Side w.
        groups: s.
        bias: Add b.
        cache: Cache the matrix of the fast form in evaluation. It takes 4 s N^2 bytes, and as
            much again for up to eight matrices at edges of maps that the window does not divide.
    """

    def __init__(self, window: int, groups: int, *, bias: bool, cache: bool = True) -> None:
        super().__init__()
        check_range("window", window, 1)
        check_range("groups", groups, 1)
        self.window, self.groups = window, groups
        # Two axes, since the authors decay it like any matrix.
        self.bias = nn.Parameter(torch.zeros(window * window, 1)) if bias else None
        self.cache = cache

    @abstractmethod
    def matrix(self, rows: Pattern, columns: Pattern) -> Tensor:
        """Return (s, e * f, e * f) for windows of e * f tokens, in at least float32."""

    def token_matrix(self) -> tuple[Tensor, tuple[int, int]]:
        """Return M of a whole window, (s, N, N), and the window's (h, w)."""
        window = Pattern(self.window, self.window)
        return self.matrix(window, window), (self.window, self.window)

    def exact_matrix(self, rows: Pattern, columns: Pattern, u: Tensor) -> Tensor:
        """Return ``matrix`` in the type of u, computed without autocast.

        Squared offsets of 28 tokens do not fit half precision.
        """
        with without_autocast(u.device):
            return self.matrix(rows, columns).to(u.dtype)

    def forward(self, u: Tensor, shifted: bool = False, contiguous: bool = False) -> Tensor:
        """Return M u + b in every window: (B, H, W, C) -> (B, H, W, C).

        Args:
            u: (B, H, W, C).
            shifted: Shift windows by half their side.
            contiguous: True for groups of adjacent channels; else channel c is in group c mod s.
        """

        def matrix(rows: Pattern, columns: Pattern) -> Tensor:
            return self.exact_matrix(rows, columns, u)

        return mix_windows(
            u, self.window, shifted, self.groups, matrix, self.bias, contiguous=contiguous
        )


class TokenFC(TokenRelation):
    """A free matrix, gMLP's spatial projection. Parameters: N^2 + N.

    Args:
        window: Side w.
        bias: Add b.
        init: "gmlp": W almost 0 and b = 1, so that the gate starts open. "posmlp": W of 0.02 and
            b = 0, what PosMLP's released code does to this unit.

    Source: Liu et al., "Pay Attention to MLPs" (gMLP), NeurIPS 2021, Sec. 2.1.
    """

    def __init__(self, window: int, *, bias: bool = True, init: Init = "gmlp") -> None:
        super().__init__(window, 1, bias=bias, cache=False)  # the matrix is there already
        self.weight = nn.Parameter(torch.empty(window**2, window**2))
        if self.bias is not None:
            self.bias = nn.Parameter(torch.full((window**2,), 1.0 if init == "gmlp" else 0.0))
        if init == "gmlp":
            nn.init.normal_(self.weight, std=TINY)
        else:
            nn.init.trunc_normal_(self.weight, std=0.02)

    def matrix(self, rows: Pattern, columns: Pattern) -> Tensor:
        """Return the weights of the window's tokens, (1, e * f, e * f)."""
        weight = corner_of_matrix(self.weight, self.window, rows, columns)
        return hide(weight, rows, columns)[None]


class LookupRelation(TokenRelation):
    """One weight per offset and group, LRPE or GLRPE. Parameters: s (2w - 1)^2 + N.

    The weights stay without softmax and start as zero, as in the released code.

    Args:
        window: Side w.
        groups: s.
        bias: Add b.
        free: Adds a free matrix (LRPE-M). N^2 parameters more.
        cache: Cache the matrix in evaluation.

    Source: PosMLP, Eq. 10 (with W), Eq. 11 (without), Sec. 4.1, end (groups).
    """

    def __init__(
        self, window: int, groups: int = 1, *, bias: bool = True, has_weight: bool = False,
        cache: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(window, groups, bias=bias, cache=cache)
        self.table = nn.Parameter(torch.zeros((2 * window - 1) ** 2, groups))
        self.weight = nn.Parameter(torch.empty(window**2, window**2)) if has_weight else None
        if self.weight is not None:
            nn.init.trunc_normal_(self.weight, std=TINY)

    def matrix(self, rows: Pattern, columns: Pattern) -> Tensor:
        """Return table[(row_m - row_n + w - 1) (2w - 1) + col_m - col_n + w - 1], (s, e f, e f)."""
        w, e, f = self.window, rows.size, columns.size
        table = self.table.unflatten(0, (2 * w - 1, 2 * w - 1))[
            w - e : w - 1 + e, w - f : w - 1 + f
        ]
        # Entry [i, j] of the unfolded axis is table[i + j]; reversed j = e - 1 - n, i = m.
        offsets = table.unfold(0, e, 1).unfold(1, f, 1).flip(3, 4)  # (e, f, s, e, f)
        matrix = offsets.permute(2, 0, 1, 3, 4).reshape(self.groups, e * f, e * f)
        if self.weight is not None:
            matrix = matrix + corner_of_matrix(self.weight, w, rows, columns)
        return hide(matrix, rows, columns)


class QuadraticRelation(TokenRelation):
    """softmax_n of a quadratic form of the offset, GGQPE. Parameters: 6 s + N.

    With X = col_n - col_m, Y = row_m - row_n, centre Delta and precision P:

        logit = (P Delta)_1 X + (P Delta)_2 Y - (P11 X^2 + P22 Y^2 + (P12 + P21) X Y) / 2

    which is -|delta - Delta|^2 / 2 in P's norm, less what the softmax cancels.

    Args:
        window: Side w.
        groups: s.
        sigma: P. "gamma_gammaT": Gamma Gamma^T. "gamma": Gamma itself, of any sign. "alpha":
            alpha^2 I (3 s + N parameters). "alpha_as_released": the same in the linear terms and I
            in the quadratic ones, so that alpha only moves the centre.
        freeze_delta: Delta = 0 (4 s + N parameters).
        bias: Add b.
        cache: Cache the matrix in evaluation.

    Source: PosMLP, Eq. 5 to 8 and 12 to 15; Table 6 (sigma and freeze_delta).
    """

    def __init__(
        self, window: int, groups: int, *, sigma: Sigma = "gamma_gammaT",
        freeze_delta: bool = False, bias: bool = True, cache: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(window, groups, bias=bias, cache=cache)
        self.sigma = sigma
        isotropic = sigma in ("alpha", "alpha_as_released")
        unit = torch.ones(groups) if isotropic else torch.eye(2).repeat(groups, 1, 1)
        self.spreads = nn.Parameter(unit + 0.01 * torch.randn_like(unit))
        self.centers = None if freeze_delta else nn.Parameter(0.01 * torch.randn(groups, 2))

    def precision(self) -> Tensor:
        """Return P (s, 2, 2)."""
        gamma = self.spreads.to(torch.promote_types(self.spreads.dtype, torch.float32))
        if self.sigma == "gamma":
            return gamma
        if self.sigma == "gamma_gammaT":
            return gamma @ gamma.mT
        return gamma.square()[:, None, None] * torch.eye(2, dtype=gamma.dtype, device=gamma.device)

    def coefficients(self) -> Tensor:
        """Return the factors of X, Y, X^2, Y^2 and X Y, (s, 5)."""
        p = self.precision()
        linear = p.new_zeros(len(p), 2)
        if self.centers is not None:
            linear = (p @ self.centers.to(p.dtype)[:, :, None]).squeeze(-1)
        if self.sigma == "alpha_as_released":
            p = torch.eye(2, dtype=p.dtype, device=p.device).expand_as(p)
        quadratic = torch.stack([p[:, 0, 0], p[:, 1, 1], p[:, 0, 1] + p[:, 1, 0]], dim=1)
        return torch.cat([linear, -0.5 * quadratic], dim=1)

    def matrix(self, rows: Pattern, columns: Pattern) -> Tensor:
        """Return (s, e * f, e * f), every row summing to 1."""
        coefficients = self.coefficients()
        e, f = rows.size, columns.size
        y, x = (_differences(side, coefficients) for side in (e, f))
        x, y = (-x)[None, :, None, :].expand(e, f, e, f), y[:, None, :, None].expand(e, f, e, f)
        basis = torch.stack([x, y, x * x, y * y, x * y]).reshape(5, -1)
        logits = (coefficients @ basis).reshape(-1, e * f, e * f)
        mask = visible(rows, columns, logits.device)
        if mask is not None:
            logits = logits.masked_fill(~mask, float("-inf"))
        return logits.softmax(dim=-1)

    def singular(self, least: float = SINGULAR) -> Tensor:
        """Return which groups have a nearly singular P, (s) booleans.

        Args:
            least: Smallest eigenvalue that counts, as a share of the layer's largest; 0 keeps all.
        """
        sizes = torch.linalg.eigvals(self.precision()).abs()  # (s, 2)
        return (sizes.amin(dim=1) <= least * sizes.max()) & (least > 0)

    def non_locality(self, least: float = SINGULAR) -> Tensor:
        """Return Eq. 16, the mean over groups of sqrt(det P); smaller reaches further.

        Nearly singular P are left out, as in App. 3; NaN where all are.
        """
        regular = self.precision()[~self.singular(least)]
        return torch.linalg.det(regular).clamp(min=0).sqrt().mean()


def hide(matrix: Tensor, rows: Pattern, columns: Pattern) -> Tensor:
    """Set to 0 what a token may not see."""
    mask = visible(rows, columns, matrix.device)
    return matrix if mask is None else matrix * mask


def _differences(size: int, like: Tensor) -> Tensor:
    """Return the differences m - n of positions, (size, size)."""
    position = torch.arange(size, dtype=like.dtype, device=like.device)
    return position[:, None] - position
