"""Products with sparse matrices that are made of a few dense blocks.

The output channels are consecutive runs; each run is the product of one weight with a run of input
columns. ``plain`` says just that. ``fast`` writes every product straight into its run of the
output, forward and backward, where autograd would copy: cat in the forward pass, padding to full
width and a sum per block in the backward pass. That is what it does where gradients are themselves
differentiated, or taken for many directions at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.amp.autocast_mode import is_autocast_available

from backbones.layers.eager import is_batched, is_eager


class MatrixBlock(NamedTuple):
    """One run of output channels: a weight, by its number, times input columns from ``start`` on.

    Several blocks may share a weight.
    """

    weight: int
    start: int


def block_products(
    x: Tensor, weights: Sequence[Tensor], bias: Tensor | None, blocks: Sequence[MatrixBlock]
) -> Tensor:
    """Apply all blocks, (..., C) -> (..., h).

    Args:
        x: (..., C).
        weights: Each (rows, columns).
        bias: (h,), or None.
        blocks: In the order of the output channels.
    """
    # A compiler makes its own plan out of the plain form.
    form = fast if is_eager(x, *weights) else plain
    return form(x, weights, bias, blocks)


def plain(
    x: Tensor, weights: Sequence[Tensor], bias: Tensor | None, blocks: Sequence[MatrixBlock]
) -> Tensor:
    """``block_products`` in operations that autograd knows."""
    pieces = []
    for index, start in blocks:
        weight = weights[index]
        pieces.append(F.linear(x[..., start : start + weight.shape[1]], weight))
    product = torch.cat(pieces, dim=-1)
    return product if bias is None else product + bias


def fast(
    x: Tensor, weights: Sequence[Tensor], bias: Tensor | None, blocks: Sequence[MatrixBlock]
) -> Tensor:
    """``block_products`` without intermediate copies."""
    device = x.device.type
    if is_autocast_available(device) and torch.is_autocast_enabled(device):
        # In-place products are not on autocast's list, so they are served as F.linear would be.
        dtype = torch.get_autocast_dtype(device)
        x, weights = x.to(dtype), [weight.to(dtype) for weight in weights]
        bias = None if bias is None else bias.to(dtype)
    rows = x.reshape(-1, x.shape[-1])
    if torch.is_grad_enabled():
        out = _BlockProducts.apply(rows, bias, blocks, *weights)  # type: ignore[no-untyped-call]
    else:
        out = _forward(rows, weights, bias, blocks)
    return out.view(*x.shape[:-1], out.shape[1])


def _forward(
    x: Tensor, weights: Sequence[Tensor], bias: Tensor | None, blocks: Sequence[MatrixBlock]
) -> Tensor:
    shapes = [weight.shape for weight in weights]  # len(tensor) takes several times as long
    rows = [shapes[index][0] for index, _ in blocks]
    out = x.new_empty(x.shape[0], sum(rows))
    runs = out.split(rows, dim=1)
    for (index, start), run in zip(blocks, runs, strict=True):
        torch.mm(x.narrow(1, start, shapes[index][1]), weights[index].t(), out=run)
    # In one pass: with a bias of its own a product first fills its run with it.
    return out if bias is None else out.add_(bias)


class _BlockProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, blocks: Sequence[MatrixBlock], *weights: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, *weights)
        ctx.blocks = blocks
        return _forward(x, weights, bias, blocks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        x_wanted, bias_wanted, _, *weight_wanted = ctx.needs_input_grad
        in_place = not (torch.is_grad_enabled() or is_batched(grad))
        grad_x = torch.zeros_like(x) if x_wanted else None
        grad_weights: list[Tensor | None] = [None] * len(weights)
        runs = grad.split([len(weights[index]) for index, _ in ctx.blocks], dim=1)
        for (index, start), run in zip(ctx.blocks, runs, strict=True):
            width = weights[index].shape[1]
            if grad_x is not None:
                if in_place:
                    grad_x.narrow(1, start, width).addmm_(run, weights[index])
                else:
                    padding = (start, x.shape[1] - start - width)
                    grad_x = grad_x + F.pad(run @ weights[index], padding)
            if weight_wanted[index]:
                columns, so_far = x.narrow(1, start, width), grad_weights[index]
                if so_far is None:
                    grad_weights[index] = run.t() @ columns
                elif in_place:
                    so_far.addmm_(run.t(), columns)
                else:
                    grad_weights[index] = so_far + run.t() @ columns
        return grad_x, grad.sum(0) if bias_wanted else None, None, *grad_weights
