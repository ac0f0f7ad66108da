"""A Kolmogorov-Arnold network of B-splines as a channel mixer.

    y_j = sum_i w_ij SiLU(x_i) + s_ij sum_m c_ijm B_m(x_i)

B_m are the B-splines of degree k on a uniform grid of G intervals in [-1, 1] and k more on either
side. Beyond them only SiLU is left.

Source: Liu et al., "KAN: Kolmogorov-Arnold Networks", ICLR 2025, https://arxiv.org/abs/2404.19756,
Eq. 2.10 to 2.12. G = 5, k = 3, grid and initialisation are those of the public code efficient-kan:
the splines start as noise of 0.1 / G at the grid's points. The paper leaves a network for vision
open. One layer from C to C has the size of an FFN with four times as wide hidden channels, to a
quarter, and is the default, as in ``cheby_kan``; ``expansion`` gives two layers.
"""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.bounds import check_range
from backbones.mixer import PointwiseMixer
from backbones.registry import register_mixer
from backbones.slots import hidden_width

NOISE = 0.1


@register_mixer("kan", kind="channel", source="KAN (ICLR 2025), Eq. 2.10 to 2.12")
class KAN(PointwiseMixer):
    """One B-spline and one SiLU for every pair of an input and an output channel.

    Class tokens are among the tokens.

    Args:
        dim: Channels C.
        intervals: G, intervals of the grid, at least 1.
        degree: k, degree of the splines, at least 1.
        expansion: Hidden channels over C of a network of two layers; None is one layer.

    Shape: (..., C) -> (..., C). Parameters of one layer: (G + k + 2) C^2.

    Raises:
        ValueError: Intervals or a degree below 1.

    Source: KAN (ICLR 2025), https://arxiv.org/abs/2404.19756.
    """

    def __init__(
        self, dim: int, *, intervals: int = 5, degree: int = 3, expansion: float | None = None
    ) -> None:
        super().__init__()
        check_range("intervals", intervals, 1)
        check_range("degree", degree, 1)
        hidden = [] if expansion is None else [hidden_width(dim, expansion)]
        widths = [dim, *hidden, dim]
        self.layers = nn.Sequential(
            *(KANLinear(*pair, intervals, degree) for pair in itertools.pairwise(widths))
        )

    def mix(self, x: Tensor) -> Tensor:
        """Return the sums of all functions: (..., C) -> (..., C)."""
        return self.layers(x)


class KANLinear(nn.Module):
    """w SiLU(x) + s c B(x): (..., in) -> (..., out).

    Args:
        in_features: Channels in.
        out_features: Channels out.
        intervals: G.
        degree: k.
    """

    def __init__(self, in_features: int, out_features: int, intervals: int, degree: int) -> None:
        super().__init__()
        self.intervals, self.degree = intervals, degree
        self.base_weight = nn.Parameter(torch.empty(out_features, in_features))
        self.spline_scaler = nn.Parameter(torch.empty(out_features, in_features))
        for weight in (self.base_weight, self.spline_scaler):
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
        points = torch.linspace(-1, 1, intervals + 1)
        noise = (torch.rand(out_features, in_features, intervals + 1) - 0.5) * NOISE / intervals
        # The smallest coefficients whose splines run through the noise.
        fit = torch.linalg.pinv(self.bases(points))  # (G + k, G + 1)
        self.spline_weight = nn.Parameter(noise @ fit.mT)

    def bases(self, x: Tensor) -> Tensor:
        """Return all splines by Cox and de Boor's recursion: (...) -> (..., G + k)."""
        step = 2 / self.intervals
        places = torch.arange(
            -self.degree, self.intervals + self.degree + 1, device=x.device, dtype=x.dtype
        )
        # In intervals from the start of each spline's first one.
        at = ((x + 1) / step).unsqueeze(-1) - places
        values = ((at[..., :-1] >= 0) & (at[..., 1:] < 0)).to(x.dtype)
        for degree in range(1, self.degree + 1):
            rising = at[..., : -degree - 1] * values[..., :-1]
            falling = -at[..., degree + 1 :] * values[..., 1:]
            values = (rising + falling) / degree
        return values

    def forward(self, x: Tensor) -> Tensor:
        """Return w SiLU(x) + s c B(x)."""
        precise = torch.promote_types(x.dtype, torch.float32)
        splines = self.bases(x.to(precise)).to(x.dtype).flatten(-2)
        weight = (self.spline_weight * self.spline_scaler.unsqueeze(-1)).flatten(1)
        return F.linear(F.silu(x), self.base_weight) + F.linear(splines, weight)
