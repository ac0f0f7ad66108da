"""Active token mixer: each channel reads a token of its row and one of its column, by offsets.

    y = W (a0 H(x) + a1 V(x) + a2 U x)
    H(x)_ij = W_h [x_{i, j + o_ijc, c}]_c + b_h,  V(x)_ij = W_v [x_{i + p_ijc, j, c}]_c + b_v

The offsets o and p are linear in LN(x); a read between two tokens is interpolated linearly, and
tokens outside of the map are zero. The shares a come from the means of all three branches (split
attention).

Source: Wei et al., "Active Token Mixer", AAAI 2023, https://arxiv.org/abs/2203.06108; the
merge and the initialisation (truncated normal of 0.02) as in the authors' code. There every second
block reuses the offsets of the one before; here each block computes its own.

Axes: B images, H W map, C channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.bounds import check_divisor
from backbones.layers.init import init_all
from backbones.layers.reweight import Reweight
from backbones.mixer import Mixer
from backbones.registry import register_mixer

ROWS, COLUMNS = 1, 2  # axes of (B, H, W, C)


@register_mixer("atm", kind="token", source="ActiveMLP (AAAI 2023)")
class ActiveTokenMixer(Mixer):
    """W (a0 H(x) + a1 V(x) + a2 U x); class tokens are not mixed: the host pools its map.

    Args:
        dim: Channels C, at least 4.
        share: Neighbouring channels that have one offset, a divisor of C.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters with share = 1 and C a multiple
    of 4: 7 C^2 + 41 C / 4.

    Raises:
        ValueError: ``share`` does not divide C.

    Source: ActiveMLP (AAAI 2023), https://arxiv.org/abs/2203.06108.
    """

    def __init__(self, dim: int, *, share: int = 1) -> None:
        super().__init__()
        check_divisor("share", share, dim)
        self.share = share
        self.norm, self.offset = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim // share)
        self.atm_c = nn.Linear(dim, dim, bias=False)
        self.atm_h, self.atm_w = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.fusion = Reweight(dim)
        self.proj = nn.Linear(dim, dim)
        init_all(self)

    def mix(self, x: Tensor) -> Tensor:
        """Read along rows and columns and merge: (B, H, W, C) -> (B, H, W, C)."""
        offsets = self.offset(self.norm(x)).repeat_interleave(self.share, dim=-1)
        along, across = offsets.chunk(2, dim=-1)
        horizontal = self.atm_w(read_at(x, along, COLUMNS))
        vertical = self.atm_h(read_at(x, across, ROWS))
        return self.proj(self.fusion(horizontal, vertical, self.atm_c(x)))


def read_at(x: Tensor, offsets: Tensor, axis: int) -> Tensor:
    """Read each value at its place plus an offset along one axis, interpolated between two tokens.

    Args:
        x: (B, H, W, C); zero outside of the map.
        offsets: (B, H, W, C), in tokens.
        axis: 1 or 2.

    Returns:
        (B, H, W, C) in the type of x.
    """
    length = x.shape[axis]
    precise = torch.promote_types(offsets.dtype, torch.float32)
    places = torch.arange(length, device=x.device, dtype=precise)
    at = offsets.to(precise) + places.view([-1 if n == axis else 1 for n in range(4)])
    low = at.detach().floor()
    # One token of zeros at either end stands for all beyond.
    ends = (0, 0, 1, 1) if axis == COLUMNS else (0, 0, 0, 0, 1, 1)
    padded = F.pad(x, ends)

    def read(place: Tensor) -> Tensor:
        return padded.gather(axis, (place + 1).clamp(0, length + 1).long())

    return torch.lerp(read(low), read(low + 1), (at - low).to(x.dtype))
