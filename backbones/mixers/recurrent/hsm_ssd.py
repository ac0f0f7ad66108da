"""Hidden-state mixer: tokens are pooled into a few states, mixed there, and read out again.

    h = sum_t a_t b_t x_t,  y_t = c_t W_o (h' SiLU(z) + d h'),  (h', z) = W_h h
    (b, c, Delta) = D W x,  a = softmax of Delta over tokens

D is a depthwise 3x3 convolution. All products of channels with channels act on the states, so that
their cost does not grow with the map.

Source: Lee et al., "EfficientViM: Efficient Vision Mamba with Hidden State Mixer based State Space
Duality", CVPR 2025, https://arxiv.org/abs/2411.15241. States by stage are those of
EfficientViM-M1; weights start as torch's do, as in the authors' code. The paper adds a number A per
state to Delta, which the softmax over tokens cancels; it is left out.

Axes: B images, N = H W tokens, C channels, E inner channels, S states.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.axes import to_nchw, to_nhwc
from backbones.layers.bounds import check_range
from backbones.layers.precision import without_autocast
from backbones.mixer import Mixer
from backbones.registry import register_mixer
from backbones.slots import Slot, hidden_width

STATES = (49, 25, 9)  # by stage


@register_mixer("hsm_ssd", kind="token", source="EfficientViM (CVPR 2025)")
class HiddenStateMixer(Mixer):
    """c_t W_o (h' SiLU(z) + d h') at any map size; class tokens are not mixed.

    The host pools its map. The cost is linear in the number of tokens.

    Args:
        dim: Channels C.
        slot: Place in the host; its stage sets the states.
        states: S; by default 49, 25 or 9 by stage.
        expansion: E over C.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters: 3 C S + 27 S + 3 C E + 1.

    Raises:
        ValueError: States or E below 1.

    Source: EfficientViM (CVPR 2025), https://arxiv.org/abs/2411.15241.
    """

    def __init__(
        self,
        dim: int,
        *,
        slot: Slot | None = None,
        states: int | None = None,
        expansion: float = 1.0,
    ) -> None:
        super().__init__()
        states = STATES[min(slot.stage if slot else 0, 2)] if states is None else states
        check_range("states", states, 1)
        inner = hidden_width(dim, expansion)
        width = 3 * states
        self.proj = nn.Linear(dim, width, bias=False)
        self.dw = nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False)
        self.hz_proj = nn.Linear(dim, 2 * inner, bias=False)
        self.out_proj = nn.Linear(inner, dim, bias=False)
        self.D = nn.Parameter(torch.ones(1))

    def mix(self, x: Tensor) -> Tensor:
        """Pool, mix the states and read them: (B, H, W, C) -> (B, H, W, C).

        The output is of fifth degree in x and may be beyond float16's 65,504; autocast ends before.
        """
        size = (x.shape[1], x.shape[2])
        parts = to_nhwc(self.dw(to_nchw(self.proj(x)))).flatten(1, 2).mT
        with without_autocast(x.device):
            b, c, delta = parts.to(self.D.dtype).chunk(3, dim=1)  # (B, S, N)
            states = (delta.softmax(dim=-1) * b) @ x.flatten(1, 2).to(self.D.dtype)
            mixed, z = self.hz_proj(states).chunk(2, dim=-1)
            mixed = self.out_proj(mixed * F.silu(z) + mixed * self.D)
            return (c.mT @ mixed).unflatten(1, size)
