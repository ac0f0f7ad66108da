"""The branch of PosMLP and gMLP by products of our own, with its token matrices kept in evaluation.

Channel c is of group c mod s, so the product with a group's matrix begins and ends with a copy of
the map that goes value by value. With each group's channels side by side these copies go run by
run, and the weights of both layers change their order instead, 1.5 gamma C^2 values in each pass.

Time of ``posmlp_t`` with over without it, on an AMD EPYC with AVX-512: products of tokens 0.87 and
0.86 (batch 1 and 8), contiguous groups 0.91 (batch 8); kept matrices 0.70 (batch 1, AVX2).

Axes: C channels, h hidden channels, s groups.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.fast.base import FastModule
from backbones.fast.cpu.linear import multiplies, select_linear
from backbones.fast.eval_cache import EvalCache
from backbones.layers.windows import Pattern, batched_products, mix_windows
from backbones.mixers.posmlp.gated_mlp import GatedMLP
from backbones.mixers.posmlp.relations import LookupRelation, QuadraticRelation, TokenFC

TOKENS_PER_CHANNEL = 4  # from where on the order of weights costs less than that of maps


class FastGatedMLP(FastModule, GatedMLP):
    """Both layers by ``linear``, and on large maps each group's channels side by side."""

    needs_operators = False

    def serves(self, x: Tensor, prefix: Tensor | None = None) -> bool:
        """Return True where either form is faster."""
        return (
            prefix is None
            and type(self.fc1) is nn.Linear
            and type(self.fc2) is nn.Linear
            and (multiplies(x) or self._joins_groups(x))
        )

    def compute(self, x: Tensor, prefix: None = None) -> Tensor:
        """Return W2 unit(GELU(W1 x + b1)) + b2: (B, H, W, C) -> (B, H, W, C)."""
        linear, fc1, fc2, gate = select_linear(x), self.fc1, self.fc2, self.gate
        if not self._joins_groups(x):
            hidden = F.gelu(linear(x, fc1.weight, fc1.bias))
            return self.drop(linear(gate(hidden), fc2.weight, fc2.bias))
        groups = gate.relation.groups
        weight, bias = (
            _by_groups(tensor.unflatten(0, (2, -1)), groups).flatten(0, 1)
            for tensor in (fc1.weight, fc1.bias)
        )
        u, v = F.gelu(linear(x, weight, bias)).chunk(2, dim=-1)
        mixed = gate.relation(u, gate.shifted, contiguous=True)
        return self.drop(linear(mixed * v, _by_groups(fc2.weight, groups), fc2.bias))

    def _joins_groups(self, x: Tensor) -> bool:
        """Return True for the usual unit on a large map, on a CPU, where this was measured."""
        return (
            self.gate.relation.groups > 1
            and self.gate.structure == "gate"
            and type(self.gate.norm) is nn.Identity
            and x.is_cpu
            and x.shape[:-1].numel() >= TOKENS_PER_CHANNEL * x.shape[-1]
        )


class FastRelation(FastModule):
    """A token relation that keeps its matrices in evaluation and multiplies by ``batched``."""

    needs_operators = False

    def compute(self: Any, u: Tensor, shifted: bool = False, contiguous: bool = False) -> Tensor:
        """Return M u + b in every window: (B, H, W, C) -> (B, H, W, C)."""
        sources = [value for name, value in self.named_parameters() if name != "bias"]

        def matrix(rows: Pattern, columns: Pattern) -> Tensor:
            if not self.cache:
                return self.exact_matrix(rows, columns, u)
            cache: EvalCache = self.__dict__.setdefault("kept", EvalCache())
            question = (rows, columns, u.dtype)
            return cache.get(sources, question, lambda: self.exact_matrix(rows, columns, u))

        # The operator computes no gradient.
        is_ours = multiplies(u) and not torch.is_grad_enabled()
        products = batched if is_ours else batched_products
        return mix_windows(
            u, self.window, shifted, self.groups, matrix, self.bias,
            contiguous=contiguous, products=products,
        )  # fmt: skip


class FastTokenFC(FastRelation, TokenFC):  # type: ignore[misc]
    """A free matrix."""


class FastLookupRelation(FastRelation, LookupRelation):  # type: ignore[misc]
    """A weight per offset."""


class FastQuadraticRelation(FastRelation, QuadraticRelation):  # type: ignore[misc]
    """A Gaussian of the offset."""


def batched(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return W_g x_g + b without a gradient: (G, M, K), (G, K, N) and (M, 1) -> (G, M, N)."""
    values = None if bias is None else bias.to(left.dtype).flatten().contiguous()
    y: Tensor = torch.ops.mixerlab.batched(left.contiguous(), right.contiguous(), values)
    return y


def _by_groups(tensor: Tensor, groups: int) -> Tensor:
    """Order axis 1, channels that are dealt out to groups, by group."""
    return tensor.unflatten(1, (-1, groups)).transpose(1, 2).flatten(1, 2)
