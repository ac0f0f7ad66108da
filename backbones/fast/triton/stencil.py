"""The backward pass of a depthwise 3x3 convolution whose input is made again, as one kernel.

Input of the convolution is s f(values) + t per channel, with f the identity, or as IFFN's branches
have it gelu(alpha values + gamma). The output's gradient is a map, or what a norm makes of one:
a grad + b + c (u - centre). Sums over tokens are taken in two steps, each in an order of its own
that never changes: a program's sums, then those of all programs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from backbones.fast.triton.parts import (
    accumulated,
    accumulator,
    address,
    gelu,
    image_stride,
    inside,
    place,
    row,
    share_out,
    taps,
)

SUMS = 12  # rows: nine taps, the output's gradient, the input's, and the input's times f - centre


@dataclass(frozen=True)
class Branches:
    """f(values) = gelu(alpha values + gamma), (h,) each, of w channels that all branches read."""

    alpha: Tensor
    gamma: Tensor
    centre: Tensor


@dataclass(frozen=True)
class NormGradient:
    """The output's gradient is a grad + b + c (u - centre), (h,) each and u (B, H W, h)."""

    a: Tensor
    b: Tensor
    c: Tensor
    centre: Tensor
    u: Tensor


def stencil_backward(
    grad: Tensor,
    values: Tensor,
    size: tuple[int, int],
    affine: tuple[Tensor | None, Tensor],
    kernel: Tensor,
    out: Tensor,
    branches: Branches | None = None,
    norm: NormGradient | None = None,
) -> Tensor:
    """Write the gradient of the input to ``out`` and return the sums, (SUMS, h).

    Args:
        grad: (B, H W, h).
        values: (B, H W, h), or (B, H W, w) with ``branches``.
        size: (H, W).
        affine: s, or None for 1, and t, (h,).
        kernel: (h, 1, 3, 3).
        out: (B, H W, h).
        branches: f, unless it is the identity.
        norm: What grad goes through before.
    """
    batch, hidden = grad.shape[0], grad.shape[2]
    programs = share_out(batch, size, hidden)
    sums = grad.new_empty(programs.grid[0], SUMS, hidden, dtype=accumulated(grad.dtype))
    scale, shift = affine
    nothing = shift  # never read
    f = branches or Branches(nothing, nothing, nothing)
    n = norm or NormGradient(nothing, nothing, nothing, nothing, grad)
    _stencil_backward[programs.grid](
        grad, values, n.u, out, sums, kernel, nothing if scale is None else scale, shift,
        f.alpha, f.gamma, f.centre, n.a, n.b, n.c, n.centre,
        *size, hidden, values.shape[2],
        image_stride(grad), grad.stride(1), image_stride(values), values.stride(1),
        image_stride(n.u), n.u.stride(1), image_stride(out), out.stride(1),
        programs.lines, programs.strips, programs.tiles,
        COLUMNS=programs.columns, CHANNELS=programs.channels, SUMS=SUMS,
        IS_SCALED=scale is not None, HAS_BRANCHES=branches is not None, HAS_NORM=norm is not None,
        ACC=accumulator(grad.dtype),
    )  # fmt: skip
    return torch.sum(sums, dim=0)


@triton.jit
def _gradient(
    grad, u, y, x, channel, a, b, c, centre, height, width, hidden, grad_token, u_token,
    HAS_NORM: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Load the output's gradient of a line, with zeros around the map."""
    mask = inside(y, x, channel, 0, height, width, hidden)
    g = tl.load(grad + address(y, x, channel, width, grad_token), mask=mask, other=0.0).to(ACC)
    if HAS_NORM:
        at = address(y, x, channel, width, u_token)
        value = tl.load(u + at, mask=mask, other=0.0).to(ACC)
        g = tl.where(mask, a * g + b + c * (value - centre), 0.0)
    return g


@triton.jit
def _stencil_backward(
    grad, values, u, out, sums, kernel, scale, shift, alpha, gamma, centre,
    norm_a, norm_b, norm_c, norm_centre, height, width, hidden, value_channels,
    grad_image, grad_token, value_image, value_token, u_image, u_token, out_image, out_token,
    LINES, STRIPS, TILES,
    COLUMNS: tl.constexpr, CHANNELS: tl.constexpr, SUMS: tl.constexpr, IS_SCALED: tl.constexpr,
    HAS_BRANCHES: tl.constexpr, HAS_NORM: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    image, first, x, channel = place(LINES, STRIPS, TILES, COLUMNS, CHANNELS)
    grad += image * grad_image
    values += image * value_image
    u += image * u_image
    out += image * out_image
    last = tl.minimum(first + LINES, height)

    k0, k1, k2 = taps(kernel, 0, channel, hidden, ACC)
    k3, k4, k5 = taps(kernel, 3, channel, hidden, ACC)
    k6, k7, k8 = taps(kernel, 6, channel, hidden, ACC)
    t = row(shift, channel, hidden, ACC)
    s = t
    if IS_SCALED:
        s = row(scale, channel, hidden, ACC)
    a, b, c, m = t, t, t, t  # placeholders without a norm and without branches below
    if HAS_NORM:
        a, b = row(norm_a, channel, hidden, ACC), row(norm_b, channel, hidden, ACC)
        c, m = row(norm_c, channel, hidden, ACC), row(norm_centre, channel, hidden, ACC)
    f_alpha, f_gamma, f_centre = t, t, t
    if HAS_BRANCHES:
        f_alpha, f_gamma = row(alpha, channel, hidden, ACC), row(gamma, channel, hidden, ACC)
        f_centre = row(centre, channel, hidden, ACC)

    zeros = tl.zeros((COLUMNS, CHANNELS), ACC)
    here, below = zeros, zeros  # of the input's gradient, in lines y and y + 1
    f_above, f_here, n_above, n_here = zeros, zeros, zeros, zeros  # f and input, y - 1 and y
    none = tl.sum(zeros, 0)
    sum0, sum1, sum2, sum3, sum4, sum5 = none, none, none, none, none, none
    sum6, sum7, sum8, of_output, of_input, dot = none, none, none, none, none, none
    for step in range(0, LINES + 2):
        y = first - 1 + step
        left = _gradient(
            grad, u, y, x - 1, channel, a, b, c, m, height, width, hidden, grad_token, u_token,
            HAS_NORM, ACC,
        )  # fmt: skip
        mid = _gradient(
            grad, u, y, x, channel, a, b, c, m, height, width, hidden, grad_token, u_token,
            HAS_NORM, ACC,
        )  # fmt: skip
        right = _gradient(
            grad, u, y, x + 1, channel, a, b, c, m, height, width, hidden, grad_token, u_token,
            HAS_NORM, ACC,
        )  # fmt: skip

        mask = inside(y + 1, x, channel, first, last, width, hidden)
        at = address(y + 1, x, channel % value_channels, width, value_token)
        f_below = tl.load(values + at, mask=mask, other=0.0).to(ACC)
        if HAS_BRANCHES:
            f_below = gelu(f_below * f_alpha + f_gamma)
        n_below = f_below
        if IS_SCALED:
            n_below = f_below * s
        n_below = tl.where(mask, n_below + t, 0.0)

        # An output at column x - 1 read the input at x by the right tap of its line, and so on.
        sum0 += tl.sum(n_above * right, 0)
        sum1 += tl.sum(n_above * mid, 0)
        sum2 += tl.sum(n_above * left, 0)
        sum3 += tl.sum(n_here * right, 0)
        sum4 += tl.sum(n_here * mid, 0)
        sum5 += tl.sum(n_here * left, 0)
        sum6 += tl.sum(n_below * right, 0)
        sum7 += tl.sum(n_below * mid, 0)
        sum8 += tl.sum(n_below * left, 0)
        own = inside(y, x, channel, first, last, width, hidden)
        of_output += tl.sum(tl.where(own, mid, 0.0), 0)

        done = here + k2 * left + k1 * mid + k0 * right
        here = below + k5 * left + k4 * mid + k3 * right
        below = k8 * left + k7 * mid + k6 * right
        mask = inside(y - 1, x, channel, first, last, width, hidden)
        done = tl.where(mask, done, 0.0)
        to = out + address(y - 1, x, channel, width, out_token)
        tl.store(to, done.to(out.dtype.element_ty), mask=mask)
        of_input += tl.sum(done, 0)
        if HAS_BRANCHES:
            dot += tl.sum(done * (f_above - f_centre), 0)
        f_above, f_here = f_here, f_below
        n_above, n_here = n_here, n_below

    to = sums + tl.program_id(0).to(tl.int64) * SUMS * hidden + channel
    there = channel < hidden
    tl.store(to, sum0, mask=there)
    tl.store(to + hidden, sum1, mask=there)
    tl.store(to + 2 * hidden, sum2, mask=there)
    tl.store(to + 3 * hidden, sum3, mask=there)
    tl.store(to + 4 * hidden, sum4, mask=there)
    tl.store(to + 5 * hidden, sum5, mask=there)
    tl.store(to + 6 * hidden, sum6, mask=there)
    tl.store(to + 7 * hidden, sum7, mask=there)
    tl.store(to + 8 * hidden, sum8, mask=there)
    tl.store(to + 9 * hidden, of_output, mask=there)
    tl.store(to + 10 * hidden, of_input, mask=there)
    tl.store(to + 11 * hidden, dot, mask=there)
