"""The re-weighting merge that CycleMLP and Hire-MLP end their token mixing with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Reweight(nn.Module):
    """A convex combination of branches, with shares per image and channel: split attention.

        a = softmax_k(W2 GELU(W1 mean_{H,W}(sum_k x_k))),  y = sum_k a_k x_k

    The shares of channel c are neighbours in what W2 gives: entry n c + k is that of branch k.

    Args:
        dim: Channels C. W1 maps to C / 4, at least to 1.
        num_branches: n.
        channels_first: Branches are (B, C, H, W) and W1, W2 1x1 convolutions, instead of
            (B, H, W, C) and linear layers.

    Shape: n of (B, H, W, C) -> (B, H, W, C). Parameters: (n + 1) C^2 / 4 + C / 4 + n C.

    Source: Chen et al., CycleMLP, ICLR 2022, and Guo et al., Hire-MLP, CVPR 2022, in their released
    code; both have it from Vision Permutator (Hou et al., 2021).
    """

    def __init__(self, dim: int, num_branches: int = 3, *, channels_first: bool = False) -> None:
        super().__init__()
        self.num_branches = num_branches
        self.channel_axis = 1 if channels_first else 3
        hidden = max(dim // 4, 1)
        layers = ((dim, hidden), (hidden, num_branches * dim))
        self.fc1, self.fc2 = (
            nn.Conv2d(*widths, 1) if channels_first else nn.Linear(*widths) for widths in layers
        )

    def forward(self, *branches: Tensor) -> Tensor:
        """Merge branches of the same shape into one of that shape."""
        axis = self.channel_axis
        spatial = (2, 3) if axis == 1 else (1, 2)
        # The mean of the sum, without writing the sum.
        means = [branch.mean(spatial, keepdim=True) for branch in branches]
        pooled = torch.stack(means).sum(0)
        logits = self.fc2(F.gelu(self.fc1(pooled)))
        shares = logits.unflatten(axis, (-1, self.num_branches)).softmax(axis + 1)
        first, *more_branches = zip(
            branches, shares.to(branches[0].dtype).unbind(axis + 1), strict=True
        )
        merged = first[0] * first[1]
        for branch, share in more_branches:
            merged = torch.addcmul(merged, branch, share)
        return merged
