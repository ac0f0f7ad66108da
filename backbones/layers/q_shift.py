"""Q-shift: quarters of the channels come from the four neighbours of a token.

Source: Duan et al., Vision-RWKV, ICLR 2025, https://arxiv.org/abs/2403.02308.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor


def q_shift(x: Tensor, whole_quarters: bool = False) -> Tensor:
    """Read quarters of the channels from the left, right, upper and lower neighbour.

    Tokens outside of the map are zero. The quarters end at int(C / 4), int(C / 2), int(3 C / 4) and
    C, as in the authors' code.

    Args:
        x: (B, H, W, C).
        whole_quarters: Each has int(C / 4) channels; those beyond stay.
    """
    dim = x.shape[-1]
    ends = [n * (dim // 4) if whole_quarters else n * dim // 4 for n in range(5)]
    sizes = [end - start for start, end in pairwise([*ends, dim])]
    from_left, from_right, from_above, from_below, rest = x.split(sizes, dim=-1)
    moved = (
        F.pad(from_left, (0, 0, 1, -1)),
        F.pad(from_right, (0, 0, -1, 1)),
        F.pad(from_above, (0, 0, 0, 0, 1, -1)),
        F.pad(from_below, (0, 0, 0, 0, -1, 1)),
    )
    return torch.cat([*moved, rest], dim=-1)
