"""Branch of gMLP and PosMLP: a feed-forward network with a gate over tokens.

Source: Liu et al., gMLP, NeurIPS 2021, https://arxiv.org/abs/2105.08050, Fig. 1; Wang et al.,
PosMLP, MM 2022, https://doi.org/10.1145/3503161.3547953, Fig. 1 to 3.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.bounds import check_divisor, check_multiple
from backbones.layers.init import init_linear
from backbones.mixer import Mixer
from backbones.mixers.posmlp.relations import LookupRelation, TokenRelation
from backbones.slots import hidden_width

Structure = Literal["gate", "add", "concat", "nonsplit"]


class SpatialGatingUnit(nn.Module):
    """Mixes the tokens of one half of the channels and gates the other half with them.

    Args:
        width: Channels h, even unless the structure is "nonsplit".
        relation: M and b.
        structure: "gate": (M u + b) * v. "add": M u + b + v. "concat": both, one after the other.
            "nonsplit": (M h + b) * h. The last two keep h channels, the first two have h / 2.
        norm: LayerNorm on what M mixes.
        shifted: Shift windows by half their side.

    Shape: (B, H, W, h) -> (B, H, W, out_features).

    Source: PosMLP, Eq. 1 and 15, Fig. 3 (a, b, c, e; norm is d).
    """

    def __init__(
        self, width: int, relation: TokenRelation, *, structure: Structure = "gate",
        norm: bool = False, shifted: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        split = structure != "nonsplit"
        if split:
            check_multiple("a hidden width that is split", width, 2)
        mixed = width // 2 if split else width
        check_divisor("groups", relation.groups, mixed)
        self.relation = relation
        self.structure, self.shifted = structure, shifted
        self.norm = nn.LayerNorm(mixed, eps=1e-6) if norm else nn.Identity()
        self.out_features = mixed if structure in ("gate", "add") else width

    def forward(self, h: Tensor) -> Tensor:
        """Return (M u + b) * v, or another ``structure``: (B, H, W, h) -> (B, H, W, out)."""
        u, v = (h, h) if self.structure == "nonsplit" else h.chunk(2, dim=-1)
        mixed = self.relation(self.norm(u), self.shifted)
        if self.structure == "add":
            return mixed + v
        if self.structure == "concat":
            return torch.cat([mixed, v], dim=-1)
        return mixed * v


class GatedMLP(Mixer):
    """W2 unit(GELU(W1 x + b1)) + b2, the branch of a gMLP or PosMLP block.

    Args:
        dim: Channels C.
        hidden_ratio: gamma, hidden width over C.
        relation: Layer that mixes tokens.
        structure: See ``SpatialGatingUnit``.
        norm: LayerNorm on what is mixed.
        shifted: Shift the windows.
        drop: Dropout after W2.

    Shape: (B, H, W, C) -> (B, H, W, C). Parameters: 1.5 gamma C^2 + (gamma + 1) C and the
        relation's, for the structures "gate" and "add".

    Source: PosMLP (MM 2022), Fig. 1, https://doi.org/10.1145/3503161.3547953.
    """

    value_layer = "fc2"

    def __init__(
        self, dim: int, hidden_ratio: float, relation: TokenRelation, *,
        structure: Structure = "gate", norm: bool = False, shifted: bool = False, drop: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        hidden = hidden_width(dim, hidden_ratio)
        self.fc1 = nn.Linear(dim, hidden)
        self.gate = SpatialGatingUnit(
            hidden, relation, structure=structure, norm=norm, shifted=shifted
        )
        self.fc2 = nn.Linear(self.gate.out_features, dim)
        self.drop = nn.Dropout(drop)
        for linear in (self.fc1, self.fc2):
            init_linear(linear)

    def mix(self, x: Tensor) -> Tensor:
        """Return W2 unit(GELU(W1 x + b1)) + b2: (B, H, W, C) -> (B, H, W, C)."""
        return self.drop(self.fc2(self.gate(F.gelu(self.fc1(x)))))

    def is_dead(self, key: str, value: Tensor) -> bool:
        """Return True for a b of zeros without place here: PosMLP's release never adds it."""
        unused = key == "gate.relation.bias" and self.gate.relation.bias is None
        return unused and not value.any()

    def to_own_size(
        self, tensors: dict[str, Tensor], source: tuple[int, int] | None = None
    ) -> dict[str, Tensor]:
        """Leave all as it is: windows follow an option, not the map."""
        return {}

    def convert_state_dict(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Bring b and the table of offsets to this window size.

        Both are resampled as pictures (bicubic). A sum over offsets grows with the number of
        tokens, so the table is scaled by the ratio of the windows' areas. Delta and Gamma count in
        tokens and stay as they are; a free matrix is not resized.

        Args:
            tensors: By their names in this mixer; what else there is stays as it is.
        """
        relation = self.gate.relation
        table, bias = (tensors.get(f"gate.relation.{name}") for name in ("table", "bias"))
        tensors = dict(tensors)
        if isinstance(relation, LookupRelation) and table is not None:
            side, file_side = 2 * relation.window - 1, math.isqrt(len(table))
            if file_side != side and file_side**2 == len(table):
                gain = ((file_side + 1) / (side + 1)) ** 2
                tensors["gate.relation.table"] = gain * _resized(table, side)
        if bias is not None and bias.ndim == 2 and math.isqrt(len(bias)) ** 2 == len(bias):
            tensors["gate.relation.bias"] = _resized(bias, relation.window)
        return tensors


def _resized(table: Tensor, side: int) -> Tensor:
    """Resample a table over a square to another side: (a * a, s) -> (side * side, s)."""
    source_side = math.isqrt(len(table))
    if source_side == side:
        return table
    picture = table.T.unflatten(1, (source_side, source_side))[None]
    resized = F.interpolate(picture, (side, side), mode="bicubic", align_corners=False)
    return resized[0].flatten(1).T.contiguous()
