"""The identity as channel mixer: the control that shows what a channel mixer adds to its host.

Source: the identity of Yu et al., "MetaFormer Baselines for Vision", TPAMI 2024,
https://arxiv.org/abs/2210.13452 (IdentityFormer), in the place of the feed-forward network.
"""

from __future__ import annotations

from torch import Tensor

from backbones.mixer import PointwiseMixer
from backbones.registry import register_mixer


@register_mixer("identity_ffn", kind="channel", source="MetaFormer baselines (2022), for channels")
class IdentityFFN(PointwiseMixer):
    """The tokens themselves, class tokens included.

    Args:
        dim: Channels C.

    Shape: (..., C) -> (..., C). Parameters: 0.

    Source: MetaFormer baselines (2022), https://arxiv.org/abs/2210.13452.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()

    def mix(self, x: Tensor) -> Tensor:
        """Return the input: (..., C) -> (..., C)."""
        return x
