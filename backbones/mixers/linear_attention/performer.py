"""Performer: softmax attention by positive orthogonal random features (FAVOR+).

    y = W [f(q) (f(k)^T v) / (f(q) sum f(k))]
    f(x) = (exp(R x' - |x'|^2 / 2 - m) + 1e-4) / sqrt n,  x' = x / d^(1/4)

R has n random directions, in blocks of d orthogonal ones with lengths of normal vectors. m is the
largest product R x' of a query, or of all keys, so that the exponential stays in range.

Source: Choromanski et al., "Rethinking Attention with Performers", ICLR 2021,
https://arxiv.org/abs/2009.14794, Lemma 1. m and 1e-4 are those of the authors' code, which passes
no gradient through m; here gradients are those of the whole expression. n = d ln d, rounded,
follows the paper's Theorem 4. R is drawn from a fixed seed and kept in checkpoints; the paper's
redrawing during training is left out.

Axes: B images, N tokens, C channels, h heads of d channels, n features.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from backbones.layers.bounds import check_range
from backbones.layers.heads import merge_heads, split_heads, usual_heads
from backbones.layers.init import init_linear
from backbones.layers.linear_attention import divide, mean_keys, sum_products
from backbones.layers.precision import without_autocast
from backbones.mixer import SequenceMixer
from backbones.registry import register_mixer

HEAD_DIM = 64
EPS = 1e-4


def orthogonal_directions(count: int, dim: int, seed: int) -> Tensor:
    """Return random directions (count, dim), orthogonal within blocks of ``dim``."""
    generator = torch.Generator().manual_seed(seed)

    def normal(rows: int) -> Tensor:
        return torch.randn(rows, dim, generator=generator, dtype=torch.float64, device="cpu")

    blocks = [torch.linalg.qr(normal(dim))[0].mT for _ in range(math.ceil(count / dim))]
    return torch.cat(blocks)[:count] * normal(count).norm(dim=1, keepdim=True)


@register_mixer("performer", kind="token", source="Performer (ICLR 2021)")
class PerformerAttention(SequenceMixer):
    """W [f(q) (f(k)^T v) / (f(q) sum f(k))] with random features f.

    Class tokens are among the tokens.

    Args:
        dim: Channels C.
        num_heads: h, a divisor of C; by default as many as leave each 64 channels or more.
        features: n; by default d ln d, rounded.
        seed: Of the random directions, which all heads share.
        qkv_bias: Add a bias in the projections of queries, keys and values.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters: 4 C^2 + 4 C, and a buffer of n d.

    Raises:
        ValueError: n below 1, or ``num_heads`` that does not divide C.

    Source: Performer (ICLR 2021), https://arxiv.org/abs/2009.14794.
    """

    ignores_order = True
    directions: Tensor

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int | None = None,
        features: int | None = None,
        seed: int = 0,
        qkv_bias: bool = True,
    ) -> None:
        super().__init__()
        self.num_heads = usual_heads(dim, num_heads, HEAD_DIM)
        width = dim // self.num_heads
        count = max(1, round(width * math.log(width))) if features is None else features
        check_range("features", count, 1)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=qkv_bias), nn.Linear(dim, dim)
        self.register_buffer(
            "directions", orthogonal_directions(count, width, seed).to(self.proj.weight)
        )
        self.apply(init_linear)

    def mix_sequence(self, tokens: Tensor) -> Tensor:
        """Attend by random features: (B, N, C) -> (B, N, C)."""
        q, k, v = (split_heads(x, self.num_heads) for x in self.qkv(tokens).chunk(3, dim=-1))
        with without_autocast(tokens.device):
            queries, keys = self._features(q, axes=(-1,)), self._features(k, axes=(-2, -1))
            # Their mean cancels as well; without it, many keys are too small for float16.
            keys = (keys / keys.detach().mean((-2, -1), keepdim=True)).to(v.dtype)
            table = torch.cat([sum_products(keys, v), mean_keys(keys)], dim=-1)
            mixed = divide(queries.to(v.dtype) @ table, 1, eps=0.0)
        return self.proj(merge_heads(mixed))

    def _features(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        """Return f(x) sqrt n with the largest product along axes: (B, h, N, d) -> (B, h, N, n).

        In float32 at least. The factor 1 / sqrt n cancels in the quotient.
        """
        precise = torch.promote_types(x.dtype, torch.float32)
        x = x * x.shape[-1] ** -0.25
        products = (x @ self.directions.to(x.dtype).mT).to(precise)
        largest = products.amax(dim=axes, keepdim=True)
        exponents = products - x.to(precise).square().sum(dim=-1, keepdim=True) / 2 - largest
        return exponents.exp() + EPS
