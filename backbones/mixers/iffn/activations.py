"""Activations with learned coefficients per channel, on (..., C).

Source: Xu et al., "Enhancing Vision Transformer: Amplifying Non-Linearity in Feedforward Network
Module", ICML 2024, https://proceedings.mlr.press/v235/xu24n.html, Eq. 3, 4 and Fig. 3; Liu et al.,
"ReActNet", ECCV 2020, https://arxiv.org/abs/2003.03488, Eq. 5 (RPReLU).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.activations import create_activation

# By name: the function and its least and greatest slope.
# GELU's are at -sqrt(2) and sqrt(2), SiLU's where x tanh(x / 2) = 2.
BASES: dict[str, tuple[Callable[[Tensor], Tensor], float, float]] = {
    "gelu": (F.gelu, -0.128904145185155, 1.128904145185155),
    "softplus": (F.softplus, 0.0, 1.0),
    "elu": (F.elu, 0.0, 1.0),
    "silu": (F.silu, -0.0998393201288668, 1.0998393201288668),
    "relu": (F.relu, 0.0, 1.0),
}
BASE_NAMES = (*BASES, "prelu")
PRELU_SLOPE = 0.25


class Base(nn.Module):
    """phi(x), one of the usual activations; "prelu" learns a slope for each channel.

    Args:
        channels: C.
        name: One of ``BASE_NAMES``, or another of ``layers.activations.create_activation``.

    Shape: (..., C) -> (..., C). Parameters: C for "prelu", otherwise none but those of the name.

    Raises:
        ValueError: Unknown name.
    """

    def __init__(self, channels: int, name: str = "gelu") -> None:
        super().__init__()
        self.name = name
        self.other = None if name in BASE_NAMES else create_activation(name)
        slope = nn.Parameter(torch.full((channels,), PRELU_SLOPE)) if name == "prelu" else None
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        """Return phi(x): (..., C) -> (..., C)."""
        if self.slope is not None:
            return torch.where(x > 0, x, x * self.slope.to(x.dtype))
        return BASES[self.name][0](x) if self.other is None else self.other(x)

    def slopes(self) -> tuple[Tensor, Tensor]:
        """Return least and greatest slope per channel; 0-dimensional where all agree.

        Raises:
            ValueError: They are unknown for this name.
        """
        if self.slope is not None:
            ones = torch.ones_like(self.slope)
            return torch.minimum(self.slope, ones), torch.maximum(self.slope, ones)
        if self.name not in BASES:
            raise ValueError(
                f"the slopes of act={self.name} are unknown; use one of {', '.join(BASE_NAMES)}"
            )
        _, low, high = BASES[self.name]
        return torch.tensor(low, dtype=torch.float64), torch.tensor(high, dtype=torch.float64)


class Arb(nn.Module):
    """beta phi(alpha x + gamma) + theta, four learned numbers per channel.

    Of GELU it is the paper's AGeLU, of ReLU and PReLU its AReLU and APReLU; it starts as phi.

    Args:
        channels: C.
        base: Name of phi, as for ``Base``.
        mirror: Start with alpha = -1, as phi(-x).
        decay: Apply weight decay to alpha and beta, as the authors' code does.

    Shape: (..., C) -> (..., C). Parameters: 4 C, and C for "prelu".

    Source: IFFN (ICML 2024), Eq. 3 and 4. No initialisation is printed; the authors' code
        begins with ones and zeros, too.
    """

    def __init__(
        self, channels: int, base: str = "gelu", *, mirror: bool = False, decay: bool = False
    ) -> None:
        super().__init__()
        self.decayed_vectors = ("alpha", "beta") if decay else ()
        self.base = Base(channels, base)
        self.alpha = nn.Parameter(torch.full((channels,), -1.0 if mirror else 1.0))
        self.beta = nn.Parameter(torch.ones(channels))
        self.gamma = nn.Parameter(torch.zeros(channels))
        self.theta = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Return beta phi(alpha x + gamma) + theta, Eq. 3: (..., C) -> (..., C)."""
        return affine(self.base(affine(x, self.alpha, self.gamma)), self.beta, self.theta)

    def slopes(self) -> tuple[Tensor, Tensor]:
        """Return least and greatest slope (C,) per channel."""
        return scaled_slopes(self.base.slopes(), self.alpha.double() * self.beta.double())


class RPReLU(nn.Module):
    """PReLU_a(x - g) + z: its turning point (g, z) is learned, its upper slope is always 1.

    Args:
        channels: C.

    Shape: (..., C) -> (..., C). Parameters: 3 C.

    Source: ReActNet (ECCV 2020), Eq. 5; IFFN (ICML 2024), Fig. 3 compares AGeLU with it.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.base = Base(channels, "prelu")
        self.g = nn.Parameter(torch.zeros(channels))
        self.z = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Return PReLU_a(x - g) + z: (..., C) -> (..., C)."""
        return self.base(x - self.g.to(x.dtype)) + self.z.to(x.dtype)

    def slopes(self) -> tuple[Tensor, Tensor]:
        """Return least and greatest slope (C,) per channel."""
        return self.base.slopes()


def affine(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return scale x + shift per channel, in the precision of x (B, ..., C)."""
    return torch.addcmul(shift.to(x.dtype), x, scale.to(x.dtype))


def scaled_slopes(slopes: tuple[Tensor, Tensor], factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return least and greatest slope (C,) after a factor (C,) of either sign."""
    ends = (slopes[0].double() * factor, slopes[1].double() * factor)
    return torch.minimum(*ends), torch.maximum(*ends)
