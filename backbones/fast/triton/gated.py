"""AFBO's operator ``gated_mixer`` on a GPU, by matrix products and Triton kernels.

Products stay the BLAS's, which a kernel of ours would not reach. Between them lies what takes a
GPU's time otherwise, one map after the other through memory: biases, both convolutions, SiLU and
product are one kernel. The backward pass runs it again for product and gradients of both
branches, then one kernel per branch for the convolutions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from backbones.fast.triton.parts import (
    accumulator,
    address,
    image_stride,
    inside,
    place,
    row,
    share_out,
    sigmoid,
    taps,
)
from backbones.fast.triton.stencil import stencil_backward


def forward(
    tokens: Tensor,
    prefix: int,
    height: int,
    width: int,
    weights: Sequence[Tensor],
    blocks: Sequence[int],
    before_a: Tensor | None,
    before_b: Tensor | None,
    kernel_a: Tensor,
    kernel_b: Tensor,
    own_a: Tensor | None,
    own_b: Tensor | None,
    proj: Tensor,
    proj_bias: Tensor | None,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """Return y (B, P + H W, C') and what is mapped, (B or 0, P + H W, 2 h)."""
    batch, count, _ = tokens.shape
    hidden, x = proj.shape[1], tokens.flatten(0, 1)
    mapped = x.new_empty(batch, count, 2 * hidden)
    to = mapped.flatten(0, 1)
    for index, rows, columns, part in _products(weights, blocks, x.shape[1]):
        weight = weights[index][:, part].t()
        if part.start:
            to[:, rows].addmm_(x[:, columns], weight)
        else:
            torch.mm(x[:, columns], weight, out=to[:, rows])
    before, own = _biases(before_a, before_b, kernel_a), _biases(own_a, own_b, kernel_a)
    product = x.new_empty(batch, count, hidden)
    if prefix:
        a, b = _pointwise(mapped[:, :prefix], before)
        product[:, :prefix] = (F.silu(a) * b).to(product.dtype)
    _launch(mapped[:, prefix:], (height, width), before, (kernel_a, kernel_b), own,
            product[:, prefix:])  # fmt: skip
    y = F.linear(product, proj, proj_bias)
    return y, mapped if keep else mapped.new_empty(0, count, 2 * hidden)


def backward(
    grad: Tensor,
    kept: Tensor,
    tokens: Tensor,
    prefix: int,
    height: int,
    width: int,
    weights: Sequence[Tensor],
    blocks: Sequence[int],
    before_a: Tensor | None,
    before_b: Tensor | None,
    kernel_a: Tensor,
    kernel_b: Tensor,
    own_a: Tensor | None,
    own_b: Tensor | None,
    proj: Tensor,
) -> tuple[Tensor, list[Tensor], Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of tokens, weights, biases before, taps (2, 9, h), own biases, W3."""
    batch, count, _ = tokens.shape
    hidden, size = proj.shape[1], (height, width)
    before, own = _biases(before_a, before_b, kernel_a), _biases(own_a, own_b, kernel_a)
    product, grads = grad.new_empty(batch, count, hidden), torch.empty_like(kept)
    grad_product = grad @ proj
    grad_mapped = torch.empty_like(kept)
    sums = kernel_a.new_zeros(2, hidden)
    if prefix:
        a, b = _pointwise(kept[:, :prefix], before)
        g = grad_product[:, :prefix].to(a.dtype)
        s = torch.sigmoid(a)
        product[:, :prefix] = (a * s * b).to(product.dtype)
        both = torch.cat([g * b * s * (1 + a * (1 - s)), g * a * s], dim=-1)
        grad_mapped[:, :prefix] = both.to(grad_mapped.dtype)
        sums += both.sum((0, 1)).unflatten(0, (2, hidden))
    _launch(kept[:, prefix:], size, before, (kernel_a, kernel_b), own, product[:, prefix:],
            grad_product[:, prefix:], grads[:, prefix:])  # fmt: skip
    flat = grad.flatten(0, 1)
    grad_proj = flat.t() @ product.flatten(0, 1)
    parts = []
    for branch, kernel in enumerate((kernel_a, kernel_b)):
        half = slice(branch * hidden, (branch + 1) * hidden)
        parts.append(
            stencil_backward(
                grads[:, prefix:, half], kept[:, prefix:, half], size, (None, before[branch]),
                kernel, grad_mapped[:, prefix:, half],
            )
        )  # fmt: skip
    both = torch.stack(parts).to(kernel_a.dtype)
    grad_weights = [torch.zeros_like(weight) for weight in weights]
    x, from_map = tokens.flatten(0, 1), grad_mapped.flatten(0, 1)
    grad_x = torch.zeros_like(x)
    for index, rows, columns, part in _products(weights, blocks, x.shape[1]):
        grad_x[:, columns].addmm_(from_map[:, rows], weights[index][:, part])
        grad_weights[index][:, part].addmm_(from_map[:, rows].t(), x[:, columns])
    return (
        grad_x.view_as(tokens),
        grad_weights,
        both[:, 10] + sums,
        both[:, :9].contiguous(),
        both[:, 9].contiguous(),
        grad_proj,
    )


def _products(
    weights: Sequence[Tensor], blocks: Sequence[int], dim: int
) -> Iterator[tuple[int, slice, slice, slice]]:
    """Yield a weight, the channels that it makes, and the columns of x and of its own.

    A block that reaches beyond the last column of x wraps to the first, which then comes twice.
    """
    row = 0
    for index, start in zip(blocks[::2], blocks[1::2], strict=True):
        rows, columns = weights[index].shape
        here = min(columns, dim - start)
        to = slice(row, row + rows)
        yield index, to, slice(start, start + here), slice(0, here)
        if here < columns:
            yield index, to, slice(0, columns - here), slice(here, columns)
        row += rows


def _biases(a: Tensor | None, b: Tensor | None, kernel: Tensor) -> tuple[Tensor, Tensor]:
    """Return both biases (h,), zeros for None."""
    a = kernel.new_zeros(kernel.shape[0]) if a is None else a
    return a, kernel.new_zeros(kernel.shape[0]) if b is None else b


def _pointwise(mapped: Tensor, before: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return prefix tokens before the gate: they skip the convolutions and their biases."""
    wide = torch.promote_types(mapped.dtype, torch.float32)
    a, b = mapped.to(wide).chunk(2, dim=-1)
    return a + before[0], b + before[1]


def _launch(
    mapped: Tensor,
    size: tuple[int, int],
    before: tuple[Tensor, Tensor],
    kernels: tuple[Tensor, Tensor],
    own: tuple[Tensor, Tensor],
    product: Tensor,
    grad: Tensor | None = None,
    grads: Tensor | None = None,
) -> None:
    """Write silu(a) b and, from the gradient of it, those of a and b."""
    hidden = product.shape[2]
    programs = share_out(product.shape[0], size, hidden)
    back = product if grad is None else grad  # never read, never written without a gradient
    to = product if grads is None else grads
    _gate[programs.grid](
        mapped, *before, *kernels, *own, product, back, to, *size, hidden,
        image_stride(mapped), mapped.stride(1), image_stride(product), product.stride(1),
        image_stride(back), back.stride(1), image_stride(to), to.stride(1),
        programs.lines, programs.strips, programs.tiles,
        COLUMNS=programs.columns, CHANNELS=programs.channels, HAS_GRADIENT=grad is not None,
        ACC=accumulator(mapped.dtype),
    )  # fmt: skip


@triton.jit
def _value(
    mapped, y, x, channel, before, height, width, hidden, token, ACC: tl.constexpr,
):  # fmt: skip
    """Load what one convolution reads of a line, with zeros around the map."""
    mask = inside(y, x, channel, 0, height, width, hidden)
    value = tl.load(mapped + address(y, x, channel, width, token), mask=mask, other=0.0).to(ACC)
    return tl.where(mask, value + before, 0.0)


@triton.jit
def _values(
    mapped, y, x, channel, before, height, width, hidden, token, ACC: tl.constexpr,
):  # fmt: skip
    """Load the columns to the left, here and to the right."""
    left = _value(mapped, y, x - 1, channel, before, height, width, hidden, token, ACC)
    mid = _value(mapped, y, x, channel, before, height, width, hidden, token, ACC)
    right = _value(mapped, y, x + 1, channel, before, height, width, hidden, token, ACC)
    return left, mid, right


@triton.jit
def _gate(
    mapped, before_a, before_b, kernel_a, kernel_b, own_a, own_b, product, grad, grads,
    height, width, hidden, mapped_image, mapped_token, product_image, product_token,
    grad_image, grad_token, grads_image, grads_token, LINES, STRIPS, TILES,
    COLUMNS: tl.constexpr, CHANNELS: tl.constexpr, HAS_GRADIENT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    image, first, x, channel = place(LINES, STRIPS, TILES, COLUMNS, CHANNELS)
    mapped_a = mapped + image * mapped_image
    mapped_b = mapped_a + hidden
    product += image * product_image
    grad += image * grad_image
    grads += image * grads_image
    last = tl.minimum(first + LINES, height)

    bias_a, bias_b = row(before_a, channel, hidden, ACC), row(before_b, channel, hidden, ACC)
    after_a, after_b = row(own_a, channel, hidden, ACC), row(own_b, channel, hidden, ACC)
    a0, a1, a2 = taps(kernel_a, 0, channel, hidden, ACC)
    a3, a4, a5 = taps(kernel_a, 3, channel, hidden, ACC)
    a6, a7, a8 = taps(kernel_a, 6, channel, hidden, ACC)
    b0, b1, b2 = taps(kernel_b, 0, channel, hidden, ACC)
    b3, b4, b5 = taps(kernel_b, 3, channel, hidden, ACC)
    b6, b7, b8 = taps(kernel_b, 6, channel, hidden, ACC)

    zeros = tl.zeros((COLUMNS, CHANNELS), ACC)
    here_a, below_a, here_b, below_b = zeros, zeros, zeros, zeros  # of lines y and y + 1
    for step in range(0, LINES + 2):
        y = first - 1 + step
        left, mid, right = _values(mapped_a, y, x, channel, bias_a, height, width, hidden,
                                   mapped_token, ACC)  # fmt: skip
        a = here_a + a6 * left + a7 * mid + a8 * right + after_a
        here_a = below_a + a3 * left + a4 * mid + a5 * right
        below_a = a0 * left + a1 * mid + a2 * right
        left, mid, right = _values(mapped_b, y, x, channel, bias_b, height, width, hidden,
                                   mapped_token, ACC)  # fmt: skip
        b = here_b + b6 * left + b7 * mid + b8 * right + after_b
        here_b = below_b + b3 * left + b4 * mid + b5 * right
        below_b = b0 * left + b1 * mid + b2 * right

        mask = inside(y - 1, x, channel, first, last, width, hidden)
        s = sigmoid(a)
        to = product + address(y - 1, x, channel, width, product_token)
        tl.store(to, (a * s * b).to(product.dtype.element_ty), mask=mask)
        if HAS_GRADIENT:
            at = grad + address(y - 1, x, channel, width, grad_token)
            g = tl.load(at, mask=mask, other=0.0).to(ACC)
            to = grads + address(y - 1, x, channel, width, grads_token)
            grad_a = g * b * s * (1.0 + a * (1.0 - s))
            tl.store(to, grad_a.to(grads.dtype.element_ty), mask=mask)
            tl.store(to + hidden, (g * a * s).to(grads.dtype.element_ty), mask=mask)
