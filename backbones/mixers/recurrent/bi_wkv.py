"""Bidirectional WKV attention: means of all values with weights that decay with the distance.

    y_t = (sum_{i != t} e^{-(|t-i|-1) w / N + k_i} v_i + e^{u / N + k_t} v_t) / (the same without v)
    out = W (sigmoid(r) * y)

k, v and r are linear in x', in which four quarters of the channels come from a neighbour above,
below, left or right (Q-shift), mixed with x channel by channel. The decay w and the bonus u are
learnt per channel.

Source: Duan et al., "Vision-RWKV: Efficient and Scalable Visual Perception with RWKV-Like
Architectures", ICLR 2025, https://arxiv.org/abs/2403.02308. Initialisation by depth as
in the authors' code, for 12 layers; deeper blocks start as the twelfth. Linear layers start as
torch's, as there. Their kernel adds 1e-6 to
the denominator, which is left out. Sums over both sides are recurrences of ``layers/scans``.

With 3,136 tokens and 64 channels a loop over tokens takes 33 times as long forward and 61 times
with gradients, on one core of an AMD EPYC by ``tools/benchmark.py scans train=true``.

Axes: B images, N = H W tokens in row-major order, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.q_shift import q_shift
from backbones.layers.scans import Scan, scan
from backbones.mixer import Mixer
from backbones.registry import register_mixer
from backbones.slots import Slot

LAYERS = 12  # of the authors' networks, over which their initialisation changes


@register_mixer("bi_wkv", kind="token", source="Vision-RWKV (ICLR 2025)")
class BidirectionalWKV(Mixer):
    """W (sigmoid(r) * y) with bidirectional WKV; class tokens are not mixed.

    The host pools its map. The cost is linear in the number of tokens.

    Args:
        dim: Channels C, at least 4.
        slot: Place in the host; its block sets the initialisation.
        whole_quarters: Shift four times int(C / 4) channels, as earlier versions; others stay.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters: 4 C^2 + 5 C.

    Source: Vision-RWKV (ICLR 2025), https://arxiv.org/abs/2403.02308.
    """

    def __init__(self, dim: int, *, slot: Slot | None = None, whole_quarters: bool = False) -> None:
        super().__init__()
        self.whole_quarters = whole_quarters
        depth = min(slot.block if slot else 0, LAYERS - 1)
        rise, fall = depth / (LAYERS - 1), 1 - depth / LAYERS
        share = torch.arange(dim) / dim
        spread = torch.arange(dim) / max(1, dim - 1)
        self.wkv = WKV()
        self.decay = nn.Parameter(-5 + 8 * spread ** (0.7 + 1.3 * rise))
        self.bonus = nn.Parameter(math.log(0.3) + 0.5 * ((torch.arange(dim) + 1) % 3 - 1))
        self.mix_k = nn.Parameter(share**fall)
        self.mix_v = nn.Parameter(share**fall + 0.3 * rise)
        self.mix_r = nn.Parameter(share ** (0.5 * fall))
        self.key, self.value, self.receptance, self.output = (
            nn.Linear(dim, dim, bias=False) for _ in range(4)
        )

    def mix(self, x: Tensor) -> Tensor:
        """Shift, attend and gate: (B, H, W, C) -> (B, H, W, C)."""
        shifted = q_shift(x, self.whole_quarters)
        difference = x - shifted
        k, v, r = (
            layer(shifted + mix * difference).flatten(1, 2)
            for layer, mix in (
                (self.key, self.mix_k), (self.value, self.mix_v), (self.receptance, self.mix_r)
            )
        )  # fmt: skip
        mean = self.wkv(k, v, self.decay, self.bonus).to(x.dtype)
        return self.output(r.sigmoid() * mean).unflatten(1, (x.shape[1], x.shape[2]))


class WKV(nn.Module):
    """``bi_wkv`` as a part, which hooks, profilers and pictures name."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = Scan()

    def forward(self, k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor) -> Tensor:
        """Return the weighted means: (B, N, C) -> (B, N, C)."""
        return bi_wkv(k, v, decay, bonus, self.sums)


def bi_wkv(
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    bonus: Tensor,
    scan: Callable[[Tensor, Tensor], Tensor] = scan,
) -> Tensor:
    """Return the weighted means y of all tokens, in float32 at least.

    Exponents are relative to the greatest key of each channel, against overflow: all weights of a
    channel differ by at most e^|w| and by those of their keys.

    Args:
        k: (B, N, C).
        v: (B, N, C).
        decay: w, (C,).
        bonus: u, (C,).
        scan: A form of ``layers.scans.scan``.
    """
    precise = torch.promote_types(k.dtype, torch.float32)
    k, v = k.to(precise), v.to(precise)
    count = k.shape[1]
    weight = (k - k.detach().amax(1, keepdim=True)).exp()
    own_weight = (bonus.to(precise) / count).exp() * weight
    # Numerators and denominators of both directions, tokens first: (N, 2, 2, B, C).
    sums = torch.stack([weight * v, weight]).movedim(2, 0)
    two_ways = torch.stack([sums, sums.flip(0)], dim=1)
    log_decay = (-decay.to(precise) / count).expand_as(two_ways)
    # The state of the token before gives a neighbour the weight 1.
    before, after = F.pad(scan(log_decay, two_ways), (0, 0) * 3 + (0, 0, 1, -1)).unbind(1)
    top, bottom = (before + after.flip(0)).movedim(0, 2).unbind(0)
    return torch.addcmul(top, own_weight, v) / (bottom + own_weight)
