"""Q-shift: quarters of the channels come from the four neighbours of a token.

Source: Duan et al., Vision-RWKV, ICLR 2025, https://arxiv.org/abs/2403.02308.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def q_shift(x: Tensor) -> Tensor:
    """Read quarters of the channels from the left, right, upper and lower neighbour.

    Tokens outside of the map are zero; channels beyond four whole quarters stay.

    Args:
        x: (B, H, W, C).
    """
    quarter = x.shape[-1] // 4
    left, right, above, below, rest = x.split([quarter] * 4 + [x.shape[-1] - 4 * quarter], dim=-1)
    moved = (
        F.pad(left, (0, 0, 1, -1)),
        F.pad(right, (0, 0, -1, 1)),
        F.pad(above, (0, 0, 0, 0, 1, -1)),
        F.pad(below, (0, 0, 0, 0, -1, 1)),
    )
    return torch.cat([*moved, rest], dim=-1)
