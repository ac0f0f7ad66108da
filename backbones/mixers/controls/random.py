"""Random token mixing: a fixed random matrix over all tokens, the same for every channel.

    y = softmax(L) x,  L uniform in [0, 1), fixed

Source: Yu et al., "MetaFormer Baselines for Vision", TPAMI 2024, https://arxiv.org/abs/2210.13452
(RandFormer). The paper fixes the matrix; ``learnt=true`` trains L, a control of our own.

Axes: N = H W tokens.
"""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch import Tensor, nn

from backbones.mixer import Mixer
from backbones.registry import register_mixer


@register_mixer("random", kind="token", source="MetaFormer baselines (2022)")
class RandomMixing(Mixer):
    """softmax(L) x over all tokens, with random logits L.

    L belongs to the map size and is interpolated for others; softmax keeps the sums of its rows.
    It holds N^2 numbers, so a first stage of 56 x 56 tokens needs 39 MB per block; the authors use
    it in the last two stages only. Class tokens are not mixed: the host pools its map.

    Args:
        dim: Channels C.
        learnt: Train L; otherwise it is a buffer, which checkpoints keep.

    Shape: (B, H, W, C) -> (B, H, W, C). Parameters: 0, or N^2 if learnt.

    Source: MetaFormer baselines (2022), https://arxiv.org/abs/2210.13452.
    """

    grid_axes = MappingProxyType({"logits": "N N"})

    def __init__(self, dim: int, *, grid: tuple[int, int], learnt: bool = False) -> None:
        super().__init__()
        self.grid = grid
        tokens = grid[0] * grid[1]
        logits = torch.rand(tokens, tokens)
        self.logits: Tensor
        if learnt:
            self.logits = nn.Parameter(logits)
        else:
            self.register_buffer("logits", logits)

    def token_matrix(self) -> tuple[Tensor, tuple[int, int]]:
        """Return softmax(L) of the map that it was built for: (1, N, N), and the map's size."""
        return self.at_size("logits", self.grid).softmax(dim=-1)[None], self.grid

    def mix(self, x: Tensor) -> Tensor:
        """Return softmax(L) x: (B, H, W, C) -> (B, H, W, C)."""
        size = (x.shape[1], x.shape[2])
        matrix = self.at_size("logits", size).softmax(dim=-1)
        return (matrix @ x.flatten(1, 2)).unflatten(1, size)
