"""HyperMixing: an MLP over tokens, whose weights two small networks compute from the tokens.

    y = LN(W2 GELU(W1^T x)),  W1 = M1(sqrt(C) x + p),  W2 = M2(sqrt(C) x + p)

M1 and M2 are MLPs of one token each, which give it its row of W1 and W2, so that any number of
tokens fits and the cost is linear in it. p are sines and cosines of the token's position. With h
heads every part works on its own C / h channels.

Source: Mai et al., "HyperMixer: An MLP-based Low Cost Alternative to Transformers", ACL 2023,
https://arxiv.org/abs/2203.03691, with ``tied`` for W2 = W1. Positions from 1,
their frequencies 10000^(-2 c / C) of channel c, the factor sqrt(C), missing biases and the
initialisation are those of the authors' code.

Axes: B images, N tokens (class tokens first, then the map in row-major order), D hidden tokens.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.bounds import check_divisor
from backbones.layers.heads import usual_heads
from backbones.layers.precision import without_autocast
from backbones.mixer import Mixer
from backbones.registry import register_mixer
from backbones.slots import hidden_width

BASE = 10000.0


@register_mixer("hyper_mixing", kind="token", source="HyperMixer (ACL 2023)")
class HyperMixing(Mixer):
    """LN(W2 GELU(W1^T x)) with weights W1 and W2 from the tokens; class tokens are among them.

    Args:
        dim: Channels C.
        expansion: D over C; D is a multiple of the heads.
        tied: W2 = W1.
        num_heads: h, a divisor of C.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters with h = 1: 2 (C^2 + C D) + 2 C,
    or C^2 + C D + 2 C if tied.

    Raises:
        ValueError: Heads that do not divide C or D.

    Source: HyperMixer (ACL 2023), https://arxiv.org/abs/2203.03691.
    """

    prefix_mixing = "joint"

    def __init__(
        self, dim: int, *, expansion: float = 2.0, tied: bool = False, num_heads: int = 1
    ) -> None:
        super().__init__()
        heads, hidden = usual_heads(dim, num_heads), hidden_width(dim, expansion)
        check_divisor("num_heads", heads, hidden)
        self.w1_gen = RowNetwork(dim, hidden, heads)
        self.w2_gen = None if tied else RowNetwork(dim, hidden, heads)
        self.layer_norm = nn.LayerNorm(dim)

    def mix_joint(self, x: Tensor, prefix: Tensor) -> tuple[Tensor, Tensor]:
        """Mix all tokens: (B, H, W, C) and (B, P, C) -> both."""
        tokens = torch.cat([prefix, x.flatten(1, 2)], dim=1)
        placed = tokens * math.sqrt(tokens.shape[-1]) + positions(tokens)
        w1 = self.w1_gen(placed)  # (B, h, N, D / h)
        w2 = w1 if self.w2_gen is None else self.w2_gen(placed)
        values = tokens.mT.unflatten(1, (w1.shape[1], -1))  # (B, h, C / h, N)
        # Sums over tokens of products of three values do not fit float16.
        norm, precise = self.layer_norm, torch.promote_types(tokens.dtype, torch.float32)
        with without_autocast(x.device):
            values, w1, w2 = (part.to(precise) for part in (values, w1, w2))
            mixed = F.gelu(values @ w1) @ w2.mT
            weight, bias = norm.weight.to(precise), norm.bias.to(precise)
            mixed = F.layer_norm(mixed.flatten(1, 2).mT, (len(bias),), weight, bias, norm.eps)
        mixed = mixed.to(tokens.dtype)
        count = prefix.shape[1]
        return mixed[:, count:].unflatten(1, x.shape[1:3]), mixed[:, :count]


class RowNetwork(nn.Module):
    """An MLP without biases per head: (B, N, C) -> (B, h, N, D / h).

    Args:
        dim: Channels C.
        hidden: D.
        heads: h.
    """

    def __init__(self, dim: int, hidden: int, heads: int) -> None:
        super().__init__()
        width = dim // heads
        self.fc1_weights = nn.Parameter(torch.empty(heads, width, width))
        self.fc2_weights = nn.Parameter(torch.empty(heads, hidden // heads, width))
        for weights in (self.fc1_weights, self.fc2_weights):
            nn.init.xavier_uniform_(weights, gain=math.sqrt(2))

    def forward(self, x: Tensor) -> Tensor:
        """Return each token's row of the weights."""
        parts = x.unflatten(-1, (len(self.fc1_weights), -1)).transpose(1, 2)
        return F.gelu(parts @ self.fc1_weights.mT) @ self.fc2_weights.mT


def positions(tokens: Tensor) -> Tensor:
    """Return sines of even and cosines of odd channels, (N, C) for tokens (B, N, C)."""
    count, dim = tokens.shape[1:]
    precise = torch.promote_types(tokens.dtype, torch.float32)
    places = torch.arange(1, count + 1, device=tokens.device, dtype=precise)
    channels = torch.arange(dim, device=tokens.device, dtype=precise)
    angles = places[:, None] / torch.pow(BASE, 2 * channels / dim)
    return torch.where(channels % 2 == 0, angles.sin(), angles.cos()).to(tokens.dtype)
