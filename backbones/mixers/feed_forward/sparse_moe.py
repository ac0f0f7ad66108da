"""Sparse mixture of experts: every token goes through the k FFNs that a router selects.

    y = sum over the k greatest g_e of g_e f_e(x),  g = softmax(W x + eps)

Each expert takes at most round(k N r / E) tokens of an image, all first choices before all second
ones and tokens in their order; others skip it and keep the block's shortcut alone. In training a
loss keeps experts equally busy, the mean of

    importance: (deviation / mean)^2 over experts of sum_x g(x)_e without eps,
    load:       the same of the probability that another draw of eps_e selects e (with noise only).

Source: Riquelme et al., "Scaling Vision with Sparse Mixture of Experts", NeurIPS 2021,
https://arxiv.org/abs/2106.05974, Sec. 2 and App. A. k = 2, r = 1.05, the loss's weight of 0.01 and
eps normal of 1 / E in training are the authors'. Their networks have 32 experts and
route batches of many images; here 4 is the default, since each is as large as the FFN that they
replace, and an image is routed by itself, so that its outputs do not depend on the batch.

Axes: B images, N tokens, E experts of capacity c.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.bounds import check_positive, check_range
from backbones.layers.experts import Experts
from backbones.layers.graph_sizes import is_any_size
from backbones.layers.precision import without_autocast
from backbones.mixer import Mixer
from backbones.registry import register_mixer
from backbones.slots import hidden_width


@register_mixer(
    "sparse_moe",
    kind="channel",
    source="V-MoE (NeurIPS 2021)",
    unfit_for=dict.fromkeys(
        ("gpt*", "ffnet_3d*"), "its experts take a limited number of all tokens"
    ),
)
class SparseMoE(Mixer):
    """The k best of E FFNs for each token; class tokens are routed among themselves.

    Tasks add its balancing loss to theirs.

    Args:
        dim: Channels C.
        hidden_ratio: M, hidden width of each expert over C.
        experts: E.
        selected: k, experts of a token, at most E.
        capacity: r, places of all experts over k N.
        noise: Deviation of eps in training times E, 1 as the authors'; 0 for none.
        balance: Weight of the balancing loss.
        act: Activation, such as "gelu"; see ``layers.activations.create_activation``.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters: E (2 M C^2 + (M + 1) C + C).

    Raises:
        ValueError: k outside of 1 to E, or a negative noise, weight or capacity.

    Source: V-MoE (NeurIPS 2021), https://arxiv.org/abs/2106.05974.
    """

    def __init__(
        self,
        dim: int,
        *,
        hidden_ratio: float = 4.0,
        experts: int = 4,
        selected: int = 2,
        capacity: float = 1.05,
        noise: float = 1.0,
        balance: float = 0.01,
        act: str = "gelu",
    ) -> None:
        super().__init__()
        check_range("selected", selected, 1, experts)
        check_positive("capacity", capacity)
        check_range("noise", noise, 0)
        check_range("balance", balance, 0)
        self.selected, self.capacity = selected, capacity
        self.noise, self.balance = noise, balance
        self.router = nn.Linear(dim, experts, bias=False)
        nn.init.trunc_normal_(self.router.weight, std=0.02)
        self.experts = Experts(experts, dim, hidden_width(dim, hidden_ratio), act)
        self.penalty: Tensor | None = None

    def mix(self, x: Tensor) -> Tensor:
        """Route the tokens of a map: (B, H, W, C) -> (B, H, W, C)."""
        self.penalty = None  # of another pass, or of a recomputation
        return self.routed(x.flatten(1, 2)).unflatten(1, x.shape[1:3])

    def mix_prefix(self, prefix: Tensor) -> Tensor:
        """Route class tokens: (B, P, C) -> (B, P, C)."""
        return self.routed(prefix)

    def routed(self, x: Tensor) -> Tensor:
        """Send tokens through their experts: (B, N, C) -> (B, N, C)."""
        count, experts = x.shape[1], self.router.out_features
        logits = self.logits(x)
        noisy = logits
        if self.training and self.noise:
            noisy = logits + self.noise / experts * torch.randn_like(logits)
        shares, expert_ids = noisy.softmax(dim=-1).topk(self.selected, dim=-1)
        if self.training and self.balance:
            self.add_penalty(logits, noisy)
        places = self.places(count)
        index, is_taken = seats(expert_ids, experts, places)
        seated = x.new_zeros(x.shape[0], experts * places + 1, x.shape[-1])
        columns = index.unsqueeze(-1).expand(-1, -1, x.shape[-1])
        seated = seated.scatter(1, columns, x.repeat(1, self.selected, 1))
        outputs = self.experts(seated[:, :-1].unflatten(1, (experts, places))).flatten(1, 2)
        back = outputs.gather(1, columns.clamp(max=experts * places - 1))
        weights = (shares.mT.flatten(1) * is_taken).to(x.dtype)
        return (weights.unsqueeze(-1) * back).unflatten(1, (self.selected, count)).sum(1)

    def places(self, count: int) -> int:
        """Return the tokens that an expert takes of ``count``, half a token to an even number."""
        if not is_any_size((count,)):
            return max(1, round(self.selected * count * self.capacity / self.router.out_features))
        # In whole numbers, since ONNX rounds no sizes.
        share = Fraction(str(self.capacity)) * self.selected / self.router.out_features
        quotient = count * share.numerator // share.denominator
        rest = count * share.numerator % share.denominator
        more = (2 * rest + quotient % 2 + share.denominator - 1) // (2 * share.denominator)
        return torch.sym_max(1, quotient + more)

    def logits(self, x: Tensor) -> Tensor:
        """Return W x in float32 at least, since rounding would turn choices: (B, N, E)."""
        precise, weight = torch.promote_types(x.dtype, torch.float32), self.router.weight
        with without_autocast(x.device):
            if weight.dtype is precise:
                return self.router(x.to(precise))
            return F.linear(x.to(precise), weight.to(precise))

    def add_penalty(self, logits: Tensor, noisy: Tensor) -> None:
        """Add the balancing loss of tokens to ``penalty``."""
        penalty = variation(logits.softmax(dim=-1).sum((0, 1)))
        if self.noise:
            least = noisy.topk(self.selected, dim=-1).values[..., -1:]
            chance = torch.special.ndtr((logits - least) * logits.shape[-1] / self.noise)
            penalty = (penalty + variation(chance.sum((0, 1)))) / 2
        penalty = self.balance * penalty
        self.penalty = penalty if self.penalty is None else self.penalty + penalty

    def take_penalty(self) -> Tensor | None:
        """Return the weighted balancing loss of the last training pass, and forget it."""
        penalty, self.penalty = self.penalty, None
        return penalty

    def __getstate__(self) -> dict[str, Any]:
        """Leave out a loss that is part of a graph."""
        return {**self.__dict__, "penalty": None}


def seats(routes: Tensor, experts: int, places: int) -> tuple[Tensor, Tensor]:
    """Assign places of experts to tokens, first choices first and tokens in their order.

    Args:
        routes: Experts of each token, (B, N, k).
        experts: E.
        places: c, of each expert.

    Returns:
        Place e c + s of each choice and token, (B, k N), or E c without one; and if it has one.
    """
    requests = routes.mT.flatten(1)
    asks = requests.unsqueeze(-1) == torch.arange(experts, device=routes.device)
    rank = asks.long().cumsum(1).gather(-1, requests.unsqueeze(-1)).squeeze(-1) - 1
    is_taken = rank < places
    return torch.where(is_taken, requests * places + rank, experts * places), is_taken


def variation(values: Tensor) -> Tensor:
    """Return (deviation / mean)^2 of a vector."""
    return values.var(correction=0) / values.mean().square()
