"""A sum of many activations of each channel by itself, without any linear layer.

    y = phi_1(x) + ... + phi_4C(x)

Source: Xu et al., "Enhancing Vision Transformer: Amplifying Non-Linearity in Feedforward Network
Module", ICML 2024, https://proceedings.mlr.press/v235/xu24n.html, Eq. 11 and Table 5. It shows what
an FFN is worth beyond its nonlinearity. The paper prints no count and leaves open whether a
coefficient of phi_j is one number or one for each channel, see ``per``; with 4C terms of one sign
its outputs are 4C times as large as its inputs, see ``scale``.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from backbones.mixer import PointwiseMixer
from backbones.mixers.iffn.activations import Base
from backbones.registry import register_mixer
from backbones.slots import hidden_width

Per = Literal["function", "element"]


@register_mixer(
    "nonlinear_sum",
    kind="channel",
    source="IFFN (ICML 2024), Eq. 11 and Table 5",
    published_on=("deit_t",),
)
class NonlinearSum(PointwiseMixer):
    """scale * sum_j [beta_j phi(alpha_j x + gamma_j) + theta_j], over j = 1 ... h.

    Args:
        dim: Channels C.
        hidden_ratio: h over C, the number of functions; 4 in Eq. 11.
        act: phi, one of gelu, softplus, elu, silu, relu, prelu.
        arb: "on" for learned coefficients (Table 5, "AGeLU"), "off" for phi itself, which makes the
            sum h phi(x) (Table 5, "GeLU"). True and False are on and off.
        per: Coefficients of a function are four numbers ("function") or four per channel
            ("element").
        scale: Factor before the sum; by default 1 / h, where Eq. 11 has 1.

    Shape: (..., C) -> (..., C). Parameters: 4 h or 4 h C with coefficients, else none but PReLU's.

    Source: IFFN (ICML 2024), Eq. 11, https://proceedings.mlr.press/v235/xu24n.html.
    """

    def __init__(
        self,
        dim: int,
        *,
        hidden_ratio: float = 4.0,
        act: str = "gelu",
        arb: Literal["on", "off"] | bool = "on",
        per: Per = "function",
        scale: float | None = None,
    ) -> None:
        super().__init__()
        if isinstance(arb, bool):  # as which YAML reads the words on and off
            arb = "on" if arb else "off"
        self.hidden = hidden_width(dim, hidden_ratio)
        self.scale = 1 / self.hidden if scale is None else float(scale)
        self.base = Base(dim, act)
        self.learned = arb == "on"
        if self.learned:
            shape = (self.hidden, dim) if per == "element" else (self.hidden,)
            self.alpha = nn.Parameter(torch.empty(shape))
            self.beta = nn.Parameter(torch.empty(shape))
            self.gamma = nn.Parameter(torch.empty(shape))
            self.theta = nn.Parameter(torch.empty(shape))
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise every function near phi; equal ones would stay equal for ever."""
        for scale in (self.alpha, self.beta):
            nn.init.trunc_normal_(scale, mean=1.0, std=0.02)
        for shift in (self.gamma, self.theta):
            nn.init.trunc_normal_(shift, std=0.02)

    def mix(self, x: Tensor) -> Tensor:
        """Return the scaled sum of h functions of each channel: (..., C) -> (..., C)."""
        if not self.learned:
            return self.base(x) * (self.scale * self.hidden)
        *coefficients, theta = self.coefficients(x)
        return self.scale * (self.sum(x, *coefficients) + theta.sum(dim=0))

    def coefficients(self, x: Tensor) -> list[Tensor]:
        """Return alpha, beta, gamma and theta in the type of x, each (h, C or 1)."""
        rows = (self.alpha, self.beta, self.gamma, self.theta)
        return [p.to(x.dtype).reshape(self.hidden, -1) for p in rows]

    def sum(self, x: Tensor, alpha: Tensor, beta: Tensor, gamma: Tensor) -> Tensor:
        """Return the sum over j without theta: (..., C), coefficients (j, C or 1) -> (..., C)."""
        return (beta * self.base(alpha * x.unsqueeze(-2) + gamma)).sum(dim=-2)
