"""Random channel mixing: a fixed random matrix over the channels, the same for every token.

    y = R x,  rows of R uniform on the unit sphere, fixed

Source: the random mixing of Yu et al., "MetaFormer Baselines for Vision", TPAMI 2024,
https://arxiv.org/abs/2210.13452 (RandFormer), over channels in the place of the feed-forward
network. The paper's rows of a softmax would average channels that a layer norm has given the mean
0, to almost nothing; rows of length 1 keep their variance.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from backbones.mixer import PointwiseMixer
from backbones.registry import register_mixer


@register_mixer("random_ffn", kind="channel", source="MetaFormer baselines (2022), for channels")
class RandomFFN(PointwiseMixer):
    """R x with a fixed random R, class tokens among the tokens.

    R is a buffer, which checkpoints keep.

    Args:
        dim: Channels C.

    Shape: (..., C) -> (..., C). Parameters: 0.

    Source: MetaFormer baselines (2022), https://arxiv.org/abs/2210.13452.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.matrix: Tensor
        self.register_buffer("matrix", F.normalize(torch.randn(dim, dim), dim=-1))

    def mix(self, x: Tensor) -> Tensor:
        """Return R x: (..., C) -> (..., C)."""
        return F.linear(x, self.matrix)
