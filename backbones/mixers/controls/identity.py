"""The identity as token mixer: the control that shows what a token mixer adds to its host.

Source: Yu et al., "MetaFormer Baselines for Vision", TPAMI 2024, https://arxiv.org/abs/2210.13452
(IdentityFormer).
"""

from __future__ import annotations

from torch import Tensor

from backbones.mixer import Mixer
from backbones.registry import register_mixer


@register_mixer("identity", kind="token", source="MetaFormer baselines (2022)")
class IdentityMixing(Mixer):
    """The map itself. Class tokens get its mean.

    Args:
        dim: Channels C.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters: 0.

    Source: MetaFormer baselines (2022), https://arxiv.org/abs/2210.13452.
    """

    ignores_order = True
    prefix_mixing = "pooled"

    def __init__(self, dim: int) -> None:
        super().__init__()

    def mix(self, x: Tensor) -> Tensor:
        """Return the map: (B, H, W, C) -> (B, H, W, C)."""
        return x
