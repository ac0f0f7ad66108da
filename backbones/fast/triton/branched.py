"""IFFN's operator ``branched_mixer`` on a GPU, by matrix products and Triton kernels.

Products stay the BLAS's. Between them activation sums, concatenation, both norms, the convolution
and GELU are one kernel in evaluation, which reads the narrow layer z. In training a norm asks for
the whole batch first: one kernel more for either norm's statistics and one behind the second.
The backward pass computes activations and norms again from z, u and the statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    gelu_slope,
    image_stride,
    inside,
    place,
    row,
    share_out,
    taps,
)
from backbones.fast.triton.stencil import Branches, NormGradient, stencil_backward

STATISTICS = 5  # centre, mean and variance of the first norm, then of the second
TOKENS, CHANNELS, TILES = 32, 64, 4  # of a program that goes through tokens, TILES times


@dataclass(frozen=True)
class Norm:
    """A batch norm of beta g + theta as what it is to g: scale and shift per channel.

    ``is_batch`` says whether mean and variance are the batch's own; sums over g are taken from
    ``centre``, which is then the mean of g.
    """

    weight: Tensor
    bias: Tensor
    beta: Tensor
    theta: Tensor
    mean: Tensor
    variance: Tensor
    centre: Tensor
    eps: float
    is_batch: bool

    @property
    def inverse(self) -> Tensor:
        """Return 1 / sqrt(variance + eps)."""
        return (self.variance + self.eps).rsqrt()

    def affine(self) -> tuple[Tensor, Tensor]:
        """Return scale and shift, (h,)."""
        inner = self.weight * self.inverse
        return inner * self.beta, self.bias + inner * (self.theta - self.mean)


@dataclass(frozen=True)
class NormBack:
    """A norm backwards: grad_g = a grad + b + c (g - centre), and gradients of its own."""

    a: Tensor
    b: Tensor
    c: Tensor
    weight: Tensor
    bias: Tensor
    beta: Tensor
    theta: Tensor


def backward_of(norm: Norm, total: Tensor, product: Tensor, tokens: int) -> NormBack:
    """Return a norm backwards from sums over tokens of gradient and gradient times (g - centre)."""
    inverse = norm.inverse
    inner, own = norm.weight * inverse, norm.beta * inverse
    zeros = torch.zeros_like(total)
    if norm.is_batch:
        share = inner * norm.beta / tokens
        # The slope of beta is 1 - beta^2 var(g) / (var + eps), without the difference.
        beta = inner * product * norm.eps * inverse * inverse
        b, c = -share * total, -share * own * own * product
        return NormBack(inner * norm.beta, b, c, own * product, total, beta, zeros)
    offset = norm.beta * norm.centre + norm.theta - norm.mean
    weight = own * product + inverse * offset * total
    beta = inner * (product + norm.centre * total)
    return NormBack(inner * norm.beta, zeros, zeros, weight, total, beta, inner * total)


def forward(
    tokens: Tensor,
    height: int,
    width: int,
    w1: Tensor,
    b1: Tensor,
    coefficients: Sequence[Tensor],
    norms: Sequence[Tensor],
    running: Sequence[Tensor],
    eps_mid: float,
    eps_dw: float,
    training: bool,
    kernel: Tensor,
    own: Tensor,
    w2: Tensor,
    b2: Tensor,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return y (B, H W, C), z (B or 0, H W, w), u (B or 0, H W, h) and statistics (5, h)."""
    batch, count, _ = tokens.shape
    hidden, size = w2.shape[1], (height, width)
    alpha, beta, gamma, theta = _wide(coefficients)
    z = torch.nn.functional.linear(tokens, w1, b1)
    statistics = alpha.new_zeros(STATISTICS, hidden)
    if training:
        mean, variance = _moments(z, (alpha, gamma))
        statistics[:3] = torch.stack([mean, beta * mean + theta, beta * beta * variance])
    else:
        statistics[1:] = torch.stack(list(running))
    mid, dw = _norms(statistics, beta, theta, norms, (eps_mid, eps_dw), training)
    product = z.new_empty(batch, count, hidden)
    u = torch.empty_like(product) if keep else product
    _convolve(z, size, (alpha, gamma), mid.affine(), kernel, own,
              None if training else dw.affine(), u if keep else None, product)  # fmt: skip
    if training:
        mean, variance = _moments(u, None)
        statistics[3:] = torch.stack([mean, variance])
        _, dw = _norms(statistics, beta, theta, norms, (eps_mid, eps_dw), training)
        _norm_gelu(u, dw, product)
    y = torch.nn.functional.linear(product, w2, b2)
    statistics = statistics.to(running[0].dtype)
    if keep:
        return y, z, u, statistics
    return y, z.new_empty(0, *z.shape[1:]), z.new_empty(0, count, hidden), statistics


def backward(
    grad: Tensor,
    z: Tensor,
    u: Tensor,
    statistics: Tensor,
    tokens: Tensor,
    height: int,
    width: int,
    w1: Tensor,
    b1: Tensor,
    coefficients: Sequence[Tensor],
    norms: Sequence[Tensor],
    eps_mid: float,
    eps_dw: float,
    training: bool,
    kernel: Tensor,
    own: Tensor,
    w2: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of tokens, W1, b1, all that has h numbers (18, h), and W2."""
    total = z.shape[0] * z.shape[1]
    alpha, beta, gamma, theta = _wide(coefficients)
    mid, dw = _norms(statistics, beta, theta, norms, (eps_mid, eps_dw), training)

    grad_v, product = grad @ w2, torch.empty_like(u)
    sums = _norm_gelu(u, dw, product, grad_v)
    grad_w2 = grad.flatten(0, 1).t() @ product.flatten(0, 1)
    back_dw = backward_of(dw, sums[0], sums[1], total)

    grad_n = product  # which is read no more
    through = NormGradient(back_dw.a, back_dw.b, back_dw.c, dw.centre, u)
    parts = stencil_backward(grad_v, z, (height, width), mid.affine(), kernel, grad_n,
                             Branches(alpha, gamma, mid.centre), through)  # fmt: skip
    back_mid = backward_of(mid, parts[10], parts[11], total)

    grad_z = torch.empty_like(z)
    slopes = _activate_back(z, grad_n, (alpha, gamma), back_mid, mid.centre, grad_z)
    flat = grad_z.flatten(0, 1)
    rows = torch.cat([
        torch.stack([slopes[0], back_mid.beta, slopes[1], back_mid.theta]),
        torch.stack([back_mid.weight, back_mid.bias, back_dw.weight, back_dw.bias]),
        parts[9:10],
        parts[:9],
    ])  # fmt: skip
    grad_b1 = (slopes[1] * alpha).unflatten(0, (-1, w1.shape[0])).sum(0)
    return (
        (grad_z @ w1).view_as(tokens),
        flat.t() @ tokens.flatten(0, 1),
        grad_b1.to(b1.dtype),
        rows.to(norms[0].dtype),
        grad_w2,
    )


def _wide(coefficients: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Join alpha, beta, gamma and theta of all branches, (h,), in at least float32."""
    wide = torch.promote_types(coefficients[0].dtype, torch.float32)
    rows = torch.cat(list(coefficients)).to(wide).unflatten(0, (-1, 4, len(coefficients[0])))
    alpha, beta, gamma, theta = rows.transpose(0, 1).flatten(1)
    return alpha, beta, gamma, theta


def _norms(
    statistics: Tensor,
    beta: Tensor,
    theta: Tensor,
    norms: Sequence[Tensor],
    eps: tuple[float, float],
    training: bool,
) -> tuple[Norm, Norm]:
    """Return both norms, from the statistics (5, h)."""
    centre, mean, variance, mean_dw, variance_dw = statistics.to(beta.dtype)
    weight, bias, weight_dw, bias_dw = (part.to(beta.dtype) for part in norms)
    ones, zeros = torch.ones_like(beta), torch.zeros_like(beta)
    return (
        Norm(weight, bias, beta, theta, mean, variance, centre, eps[0], training),
        Norm(weight_dw, bias_dw, ones, zeros, mean_dw, variance_dw, mean_dw, eps[1], training),
    )


def _moments(values: Tensor, branches: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance per channel of values or gelu(alpha values + gamma)."""
    flat = values.flatten(0, 1)
    total, channels = flat.shape
    hidden = channels if branches is None else len(branches[0])
    share = TOKENS * TILES
    programs, block = triton.cdiv(total, share), min(CHANNELS, triton.next_power_of_2(hidden))
    kept = values.new_empty(programs, 2, hidden, dtype=accumulated(values.dtype))
    nothing = kept
    _moments_kernel[programs, triton.cdiv(hidden, block)](
        flat, *(branches or (nothing, nothing)), kept, total, channels, hidden,
        TOKENS=TOKENS, CHANNELS=block, TILES=TILES, HAS_BRANCHES=branches is not None,
        ACC=accumulator(values.dtype),
    )  # fmt: skip
    # Sets of values make one: Chan, Golub and LeVeque, 1983.
    first = torch.arange(programs, device=values.device, dtype=torch.float64) * share
    counts = (total - first).clamp(max=share).unsqueeze(1)
    means, squares = kept.double().unbind(1)
    mean = (counts * means).sum(0) / total
    square = squares.sum(0) + (counts * (means - mean).square()).sum(0)
    return mean.to(kept.dtype), (square / total).to(kept.dtype)


def _convolve(
    z: Tensor,
    size: tuple[int, int],
    branches: tuple[Tensor, Tensor],
    mid: tuple[Tensor, Tensor],
    kernel: Tensor,
    own: Tensor,
    dw: tuple[Tensor, Tensor] | None,
    u: Tensor | None,
    product: Tensor,
) -> None:
    """Write the convolution's output to u and, if its norm is an affine map, GELU's to product."""
    batch, _, hidden = product.shape
    programs = share_out(batch, size, hidden)
    to = product if u is None else u
    _convolve_kernel[programs.grid](
        z, *branches, *mid, kernel, own, *(dw or mid), to, product,
        *size, hidden, z.shape[2], image_stride(z), z.stride(1),
        image_stride(product), product.stride(1), programs.lines, programs.strips, programs.tiles,
        COLUMNS=programs.columns, CHANNELS=programs.channels, HAS_U=u is not None,
        HAS_NORM=dw is not None, ACC=accumulator(z.dtype),
    )  # fmt: skip


def _norm_gelu(u: Tensor, norm: Norm, product: Tensor, grad: Tensor | None = None) -> Tensor:
    """Return gelu(BN(u)), or scale a gradient in place by GELU's slope and sum it (2, h)."""
    flat = u.flatten(0, 1)
    total, hidden = flat.shape
    block = min(CHANNELS, triton.next_power_of_2(hidden))
    programs = triton.cdiv(total, TOKENS * TILES)
    rows = programs if grad is not None else 0
    sums = u.new_empty(rows, 2, hidden, dtype=accumulated(u.dtype))
    scale, shift = norm.affine()
    _norm_gelu_kernel[programs, triton.cdiv(hidden, block)](
        flat, scale, shift, norm.centre, product, product if grad is None else grad,
        scale if grad is None else sums, total, hidden, TOKENS=TOKENS, CHANNELS=block, TILES=TILES,
        HAS_GRADIENT=grad is not None, ACC=accumulator(u.dtype),
    )  # fmt: skip
    return torch.sum(sums, dim=0)


def _activate_back(
    z: Tensor,
    grad_n: Tensor,
    branches: tuple[Tensor, Tensor],
    norm: NormBack,
    centre: Tensor,
    grad_z: Tensor,
) -> Tensor:
    """Return the gradients of z, and of alpha and gamma, (2, h)."""
    total, width = z.shape[0] * z.shape[1], z.shape[2]
    hidden = grad_n.shape[2]
    block = min(CHANNELS, triton.next_power_of_2(width))
    programs = triton.cdiv(total, TOKENS)
    sums = z.new_empty(programs, 2, hidden, dtype=accumulated(z.dtype))
    _activate_back_kernel[programs, triton.cdiv(width, block)](
        z, grad_n, *branches, norm.a, norm.b, norm.c, centre, grad_z, sums, total, width, hidden,
        TOKENS=TOKENS, CHANNELS=block, ACC=accumulator(z.dtype),
    )  # fmt: skip
    return torch.sum(sums, dim=0)


@triton.jit
def _moments_kernel(
    values, alpha, gamma, kept, total, channels, hidden, TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr, TILES: tl.constexpr, HAS_BRANCHES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    there = channel < hidden
    mean = tl.zeros((CHANNELS,), ACC)
    square = tl.zeros((CHANNELS,), ACC)
    for tile in range(0, TILES):
        start = (tl.program_id(0) * TILES + tile) * TOKENS
        token = start + tl.arange(0, TOKENS)
        mask = (token < total)[:, None] & there[None, :]
        at = token.to(tl.int64)[:, None] * channels + (channel % channels)[None, :]
        value = tl.load(values + at, mask=mask, other=0.0).to(ACC)
        if HAS_BRANCHES:
            a, g = row(alpha, channel, hidden, ACC), row(gamma, channel, hidden, ACC)
            value = gelu(value * a + g)
        count = tl.minimum(tl.maximum(total - start, 0), TOKENS).to(ACC)
        some = tl.maximum(count, 1.0)  # no token: nothing is divided by
        own = tl.sum(tl.where(mask, value, 0.0), 0) / some
        away = tl.where(mask, value - own[None, :], 0.0)
        before = tl.minimum(tile * TOKENS, tl.maximum(total - (start - tile * TOKENS), 0)).to(ACC)
        shift = tl.where(count > 0, own - mean, 0.0)
        share = count / tl.maximum(before + count, 1.0)
        square += tl.sum(away * away, 0) + shift * shift * before * share
        mean += shift * share
    to = kept + tl.program_id(0).to(tl.int64) * 2 * hidden + channel
    tl.store(to, mean, mask=there)
    tl.store(to + hidden, square, mask=there)


@triton.jit
def _input(
    z, y, x, channel, alpha, gamma, scale, shift, height, width, hidden, channels, token,
    ACC: tl.constexpr,
):  # fmt: skip
    """Load what the convolution reads of a line, with zeros around the map."""
    mask = inside(y, x, channel, 0, height, width, hidden)
    at = address(y, x, channel % channels, width, token)
    value = tl.load(z + at, mask=mask, other=0.0).to(ACC)
    return tl.where(mask, gelu(value * alpha + gamma) * scale + shift, 0.0)


@triton.jit
def _convolve_kernel(
    z, alpha, gamma, mid_scale, mid_shift, kernel, own, dw_scale, dw_shift, u, product,
    height, width, hidden, channels, z_image, z_token, out_image, out_token, LINES, STRIPS, TILES,
    COLUMNS: tl.constexpr, CHANNELS: tl.constexpr, HAS_U: tl.constexpr, HAS_NORM: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    image, first, x, channel = place(LINES, STRIPS, TILES, COLUMNS, CHANNELS)
    z += image * z_image
    u += image * out_image
    product += image * out_image
    last = tl.minimum(first + LINES, height)
    k0, k1, k2 = taps(kernel, 0, channel, hidden, ACC)
    k3, k4, k5 = taps(kernel, 3, channel, hidden, ACC)
    k6, k7, k8 = taps(kernel, 6, channel, hidden, ACC)
    bias = row(own, channel, hidden, ACC)
    a, g = row(alpha, channel, hidden, ACC), row(gamma, channel, hidden, ACC)
    s, t = row(mid_scale, channel, hidden, ACC), row(mid_shift, channel, hidden, ACC)
    after_s, after_t = row(dw_scale, channel, hidden, ACC), row(dw_shift, channel, hidden, ACC)
    zeros = tl.zeros((COLUMNS, CHANNELS), ACC)
    here, below = zeros, zeros  # of lines y and y + 1
    for step in range(0, LINES + 2):
        y = first - 1 + step
        left = _input(
            z, y, x - 1, channel, a, g, s, t, height, width, hidden, channels, z_token, ACC
        )
        mid = _input(z, y, x, channel, a, g, s, t, height, width, hidden, channels, z_token, ACC)
        right = _input(
            z, y, x + 1, channel, a, g, s, t, height, width, hidden, channels, z_token, ACC
        )
        done = here + k6 * left + k7 * mid + k8 * right + bias
        here = below + k3 * left + k4 * mid + k5 * right
        below = k0 * left + k1 * mid + k2 * right
        mask = inside(y - 1, x, channel, first, last, width, hidden)
        to = address(y - 1, x, channel, width, out_token)
        if HAS_U:
            tl.store(u + to, done.to(u.dtype.element_ty), mask=mask)
        if HAS_NORM:
            done = gelu(done * after_s + after_t)
            tl.store(product + to, done.to(product.dtype.element_ty), mask=mask)


@triton.jit
def _norm_gelu_kernel(
    u, scale, shift, centre, product, grad, sums, total, hidden, TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr, TILES: tl.constexpr, HAS_GRADIENT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    there = channel < hidden
    s, t = row(scale, channel, hidden, ACC), row(shift, channel, hidden, ACC)
    m = row(centre, channel, hidden, ACC)
    of_grad = tl.zeros((CHANNELS,), ACC)
    dot = tl.zeros((CHANNELS,), ACC)
    for tile in range(0, TILES):
        token = (tl.program_id(0) * TILES + tile) * TOKENS + tl.arange(0, TOKENS)
        mask = (token < total)[:, None] & there[None, :]
        at = token.to(tl.int64)[:, None] * hidden + channel[None, :]
        value = tl.load(u + at, mask=mask, other=0.0).to(ACC)
        v = value * s + t
        tl.store(product + at, gelu(v).to(product.dtype.element_ty), mask=mask)
        if HAS_GRADIENT:
            g = tl.load(grad + at, mask=mask, other=0.0).to(ACC) * gelu_slope(v)
            tl.store(grad + at, g.to(grad.dtype.element_ty), mask=mask)
            of_grad += tl.sum(tl.where(mask, g, 0.0), 0)
            dot += tl.sum(tl.where(mask, g * (value - m), 0.0), 0)
    if HAS_GRADIENT:
        to = sums + tl.program_id(0).to(tl.int64) * 2 * hidden + channel
        tl.store(to, of_grad, mask=there)
        tl.store(to + hidden, dot, mask=there)


@triton.jit
def _activate_back_kernel(
    z, grad_n, alpha, gamma, norm_a, norm_b, norm_c, centre, grad_z, sums, total, width, hidden,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    own = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    there = own < width
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    mask = (token < total)[:, None] & there[None, :]
    long_token = token.to(tl.int64)[:, None]
    value = tl.load(z + long_token * width + own[None, :], mask=mask, other=0.0).to(ACC)
    result = tl.zeros((TOKENS, CHANNELS), ACC)
    to = sums + tl.program_id(0).to(tl.int64) * 2 * hidden
    for branch in range(0, hidden // width):
        channel = tl.where(there, branch * width + own, hidden)
        a, g = row(alpha, channel, hidden, ACC), row(gamma, channel, hidden, ACC)
        grad = tl.load(grad_n + long_token * hidden + channel[None, :], mask=mask, other=0.0)
        inner = value * a + g
        away = gelu(inner) - row(centre, channel, hidden, ACC)
        grad = grad.to(ACC) * row(norm_a, channel, hidden, ACC)
        grad += row(norm_b, channel, hidden, ACC) + row(norm_c, channel, hidden, ACC) * away
        grad = tl.where(mask, grad * gelu_slope(inner), 0.0)
        result += grad * a
        tl.store(to + channel, tl.sum(grad * value, 0), mask=there)
        tl.store(to + hidden + channel, tl.sum(grad, 0), mask=there)
    tl.store(
        grad_z + long_token * width + own[None, :], result.to(grad_z.dtype.element_ty), mask=mask
    )
