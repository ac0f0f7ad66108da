"""Soft mixture of experts: every slot of an expert is a mean of all tokens, and back again.

    L = norm(X) (g norm(Phi)),  D = softmax of L over tokens,  C = softmax of L over slots
    Y = C [f_1(D_1^T X), ..., f_n(D_n^T X)]

f_i is the FFN of expert i, which gets p slots. norm gives tokens and slots the length 1; g is
learnt.

Source: Puigcerver et al., "From Sparse to Soft Mixtures of Experts", ICLR 2024,
https://arxiv.org/abs/2308.00951, Sec. 2.1 and 2.3. One slot per expert is the paper's choice; its
networks have 128 experts and more, of which the default of 4 takes fewer, since each is as large as
the FFN that they replace. Phi starts normal of variance 1 / C.

Axes: B images, N tokens (class tokens first, then the map), C channels, n experts of p slots.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.bounds import check_range
from backbones.layers.experts import Experts
from backbones.mixer import Mixer
from backbones.registry import register_mixer
from backbones.slots import hidden_width


@register_mixer(
    "soft_moe",
    kind="channel",
    source="Soft MoE (ICLR 2024)",
    unfit_for=dict.fromkeys(("gpt*", "ffnet_3d*"), "its slots read all tokens"),
)
class SoftMoE(Mixer):
    """C f(D^T X) with soft means D and C; class tokens are among the tokens.

    It mixes tokens as well, through the slots. The cost is linear in the number of tokens.

    Args:
        dim: Channels C.
        hidden_ratio: M, hidden width of each expert over C.
        experts: n.
        slots: p, slots of each expert.
        act: Activation, such as "gelu"; see ``layers.activations.create_activation``.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters: n (2 M C^2 + (M + 1) C + p C) +
    1.

    Raises:
        ValueError: Experts or slots below 1.

    Source: Soft MoE (ICLR 2024), https://arxiv.org/abs/2308.00951.
    """

    prefix_mixing = "joint"
    ignores_order = True

    def __init__(
        self,
        dim: int,
        *,
        hidden_ratio: float = 4.0,
        experts: int = 4,
        slots: int = 1,
        act: str = "gelu",
    ) -> None:
        super().__init__()
        check_range("experts", experts, 1)
        check_range("slots", slots, 1)
        self.phi = nn.Parameter(dim**-0.5 * torch.randn(dim, experts, slots))
        self.scale = nn.Parameter(torch.ones(1))
        self.experts = Experts(experts, dim, hidden_width(dim, hidden_ratio), act)

    def mix_joint(self, x: Tensor, prefix: Tensor) -> tuple[Tensor, Tensor]:
        """Send means of all tokens through the experts: (B, H, W, C) and (B, P, C) -> both."""
        tokens = torch.cat([prefix, x.flatten(1, 2)], dim=1)
        phi = self.scale * F.normalize(self.phi, dim=0).flatten(1)
        logits = F.normalize(tokens, dim=-1) @ phi  # (B, N, n p)
        inputs = logits.softmax(dim=1).mT @ tokens
        outputs = self.experts(inputs.unflatten(1, self.phi.shape[1:])).flatten(1, 2)
        mixed = logits.softmax(dim=-1) @ outputs
        count = prefix.shape[1]
        return mixed[:, count:].unflatten(1, x.shape[1:3]), mixed[:, :count]
