"""A Kolmogorov-Arnold layer of Chebyshev polynomials as a channel mixer.

    y_j = sum_{i, d} c[d, i, j] T_d(tanh(x_i)),   T_0 = 1, T_1 = t, T_d = 2 t T_{d-1} - T_{d-2}

Source: the public KAN-ViT code that AFBO (ICLR 2025), Table 15, compares with: one layer from C to
C channels of degree 8, without bias and without hidden width. The accuracies of that table (73.1,
79.7, 81.5) are digit for digit those that KAN-ViT's page gives for its plain DeiT, and it leaves
out its KAN. Such layers are those of Sidharth et al., "Chebyshev Polynomial-Based Kolmogorov-Arnold
Networks", 2024, https://arxiv.org/abs/2405.07200.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from backbones.layers.bounds import check_range
from backbones.mixer import PointwiseMixer
from backbones.registry import register_mixer


@register_mixer(
    "cheby_kan",
    kind="channel",
    source="KAN-ViT's code; AFBO (ICLR 2025), Table 15",
    published_on=("deit_*",),
)
class ChebyKAN(PointwiseMixer):
    """One Chebyshev polynomial for every pair of an input and an output channel.

    Args:
        dim: Channels C.
        degree: D, degree of the polynomials, at least 1.

    Shape: (..., C) -> (..., C). Parameters: (D + 1) C^2.

    Raises:
        ValueError: A degree below 1.

    Source: Sidharth et al., 2024, https://arxiv.org/abs/2405.07200.
    """

    def __init__(self, dim: int, *, degree: int = 8) -> None:
        super().__init__()
        check_range("degree", degree, 1)
        self.degree = degree
        self.coefficients = nn.Parameter(torch.empty(degree + 1, dim, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw a normal of 1 / (C (D + 1)), as the authors do."""
        terms, dim, _ = self.coefficients.shape
        nn.init.normal_(self.coefficients, std=1 / (dim * terms))

    def mix(self, x: Tensor) -> Tensor:
        """Return the sum of all polynomials of tanh(x): (..., C) -> (..., C)."""
        t = x.tanh()
        terms = [torch.ones_like(t), t]
        for _ in range(2, self.degree + 1):
            terms.append(2 * t * terms[-1] - terms[-2])
        return torch.cat(terms, dim=-1) @ self.coefficients.flatten(0, 1)
