"""PolyNeXt's polynomial MLP: the normed product of two linear maps, without an activation.

    y = W2 LN(a * b),  (a, b) = W1 x

Source: "PolyNeXt", 2026, https://arxiv.org/abs/2605.20839; widths by stage, the norm without bias
and He's normal initialisation as in the authors' code.
"""

from __future__ import annotations

from torch import Tensor, nn

from backbones.mixer import PointwiseMixer
from backbones.registry import register_mixer
from backbones.slots import Slot, hidden_width

EXPANSIONS = (1.0, 1.0, 0.875, 0.875)  # by stage


@register_mixer("poly_mlp", kind="channel", source="PolyNeXt (ICML 2026), PolyMLP")
class PolynomialMLP(PointwiseMixer):
    """W2 LN(a * b), class tokens among the tokens.

    Args:
        dim: Channels C.
        slot: Place in the host; its stage sets the width.
        expansion: M, channels of a and b over C; by default 1, 1, 0.875 or 0.875 by stage.

    Shape: (..., C) -> (..., C). Parameters: 3 M C^2 + M C.

    Source: PolyNeXt (ICML 2026), https://arxiv.org/abs/2605.20839.
    """

    value_layer = "fc2"

    def __init__(
        self, dim: int, *, slot: Slot | None = None, expansion: float | None = None
    ) -> None:
        super().__init__()
        usual = EXPANSIONS[min(slot.stage if slot else 0, 3)]
        hidden = hidden_width(dim, usual if expansion is None else expansion)
        self.fc1 = nn.Linear(dim, 2 * hidden, bias=False)
        self.norm = nn.LayerNorm(hidden, bias=False)
        self.fc2 = nn.Linear(hidden, dim, bias=False)
        for layer in (self.fc1, self.fc2):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")

    def mix(self, x: Tensor) -> Tensor:
        """Return W2 LN(a * b): (..., C) -> (..., C)."""
        a, b = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(self.norm(a * b))
