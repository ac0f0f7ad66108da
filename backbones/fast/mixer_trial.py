"""AFBO's and IFFN's operators on a small map, against the equations in torch's operations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from backbones.fast.trial import Result

# Odd numbers of tokens, in a line and in all: what goes by fours, by twos and one by one.
BATCH, SIZE, PREFIX, DIM, WIDTH = 3, (5, 17), 1, 32, 40
EPS = (1e-5, 1e-3)
COEFFICIENTS = ("alpha", "beta", "gamma", "theta")
Numbers = list[Tensor]


def results(dtype: torch.dtype) -> Iterator[Result]:
    """Compute outputs and gradients of all three operators in a type."""
    yield from _gated(dtype)
    for operator in ("branched_mixer", "layered_mixer"):
        for training in (False, True):
            yield from _branched(dtype, operator, training)


def _numbers(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Draw normal numbers from a generator with its own seed."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    if len(shape) == 2:
        values /= shape[1] ** 0.5
    return values.to(dtype)


def _make(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> Numbers:
    return [_numbers(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]


@torch.enable_grad()
def _compare(
    operator: str, names: str, computed: Numbers, y: Tensor, leaves: Numbers, grad: Tensor
) -> Iterator[Result]:
    """Yield the output with and without kept maps, and the gradients of the named leaves."""
    expected = [y.detach(), y.detach(), *torch.autograd.grad(y, leaves, grad.double())]
    labels = ["output for inference", "output"]
    labels += [f"gradient of {name}" for name in names.split()]
    for index, (label, ours, right) in enumerate(zip(labels, computed, expected, strict=True)):
        # Rounding of a sum over tokens that should be zero does not count.
        least = (BATCH * SIZE[0] * SIZE[1]) ** 0.5 if index > 2 else 1.0
        yield Result(f"{operator}: {label}", ours, right, least)


def _depthwise(x: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
    """Convolve maps (B, H W, h), each channel by itself."""
    maps = x.unflatten(1, SIZE).permute(0, 3, 1, 2)
    y = F.conv2d(maps, kernel, bias, padding=1, groups=kernel.shape[0])
    return y.permute(0, 2, 3, 1).flatten(1, 2)


def _gated(dtype: torch.dtype) -> Iterator[Result]:
    forward, backward = torch.ops.mixerlab.gated_mixer, torch.ops.mixerlab.gated_mixer_backward
    h, count = 2 * WIDTH, PREFIX + SIZE[0] * SIZE[1]
    shapes = [(BATCH, count, DIM), (h, DIM), (h, DIM), (h,), (h,), (h, 1, 3, 3), (h, 1, 3, 3)]
    shapes += [(h,), (h,), (DIM, h), (DIM,), (BATCH, count, DIM)]
    *leaves, grad = _make(shapes, dtype)
    x, w_a, w_b, b_a, b_b, k_a, k_b, o_a, o_b, w3, b3 = leaves
    rest = (b_a, b_b, k_a, k_b, o_a, o_b, w3)
    options = (PREFIX, *SIZE, [w_a, w_b], [0, 0, 1, 0])
    at_once, _ = forward(x, *options, *rest, b3, False)
    y, saved = forward(x, *options, *rest, b3, True)
    of_x, of_w, before, taps, of_bias, proj = backward(grad, saved, x, *options, *rest)
    kernels = [part.t().reshape(h, 1, 3, 3) for part in taps]
    results = [at_once, y, of_x, *of_w, *before, *kernels, *of_bias, proj, grad.sum((0, 1))]

    with torch.enable_grad():
        leaves = [leaf.double().requires_grad_() for leaf in leaves]
        x, w_a, w_b, b_a, b_b, k_a, k_b, o_a, o_b, w3, b3 = leaves
        a, b = F.linear(x, w_a, b_a), F.linear(x, w_b, b_b)
        prefix = F.silu(a[:, :PREFIX]) * b[:, :PREFIX]
        a, b = _depthwise(a[:, PREFIX:], k_a, o_a), _depthwise(b[:, PREFIX:], k_b, o_b)
        reference = F.linear(torch.cat([prefix, F.silu(a) * b], dim=1), w3, b3)
    names = "x W_a W_b b_a b_b kernel_a kernel_b own_a own_b W3 b3"
    yield from _compare("gated_mixer", names, results, reference, leaves, grad)


def _branched(dtype: torch.dtype, operator: str, training: bool) -> Iterator[Result]:
    forward = getattr(torch.ops.mixerlab, operator)
    backward = getattr(torch.ops.mixerlab, f"{operator}_backward")
    layered = operator == "layered_mixer"
    h, count = 2 * WIDTH, SIZE[0] * SIZE[1]
    shapes: list[tuple[int, ...]] = [(BATCH, count, DIM), (WIDTH, DIM), (WIDTH,)]
    shapes += [(WIDTH,)] * 8 + [(h,)] * 4 + [(h, 1, 3, 3), (h,), (DIM, h), (DIM,)]
    *leaves, grad = _make([*shapes, (BATCH, count, DIM)], dtype)
    running = [value.abs() + 0.5 for value in _make([(h,)] * 4, dtype)]
    for index in (3, 4, 7, 8):  # alpha and beta near 1: a norm enlarges what a small one rounds
        leaves[index] = 1 + leaves[index] / 5
    x, w1, b1 = leaves[:3]
    coefficients, norms, (kernel, bias, w2, b2) = leaves[3:11], leaves[11:15], leaves[15:]
    arguments = (
        x,
        *SIZE,
        w1,
        b1,
        coefficients,
        norms,
        running[2:] if layered else running,
        *EPS,
        training,
        kernel,
        bias,
        w2,
        b2,
    )
    y, *saved = forward(*arguments, True)
    at_once = y if training else forward(*arguments, False)[0]
    of_x, of_w1, of_b1, rows, of_w2 = backward(
        grad, *saved, x, *SIZE, w1, b1, coefficients, norms, *EPS, training, kernel,
        bias, w2,
    )  # fmt: skip
    branches = [row[part * WIDTH :][:WIDTH] for part in range(2) for row in rows[:4]]
    taps = rows[9:].t().reshape(h, 1, 3, 3)
    results = [at_once, y, of_x, of_w1, of_b1, *branches, *rows[4:8], taps, rows[8], of_w2]
    results.append(grad.sum((0, 1)))

    with torch.enable_grad():
        leaves = [leaf.double().requires_grad_() for leaf in leaves]
        x, w1, b1 = leaves[:3]
        c, norms, (kernel, bias, w2, b2) = leaves[3:11], leaves[11:15], leaves[15:]
        z = F.linear(x, w1, b1)
        n = torch.cat([c[i + 1] * F.gelu(c[i] * z + c[i + 2]) + c[i + 3] for i in (0, 4)], dim=-1)
        means = [value.double() for value in running]
        if layered:
            n = F.layer_norm(n, (h,), norms[0], norms[1], EPS[0])
        else:
            n = _norm(n, means[:2], norms[:2], EPS[0], training)
        u = _norm(_depthwise(n, kernel, bias), means[2:], norms[2:], EPS[1], training)
        reference = F.linear(F.gelu(u) + n if layered else F.gelu(u), w2, b2)
    branched = " ".join(f"{name}{branch}" for branch in (1, 2) for name in COEFFICIENTS)
    names = f"x W1 b1 {branched} weight_mid bias_mid weight_dw bias_dw kernel own W2 b2"
    mode = "in training" if training else "in evaluation"
    yield from _compare(f"{operator} {mode}", names, results, reference, leaves, grad)


def _norm(x: Tensor, running: Numbers, affine: Numbers, eps: float, training: bool) -> Tensor:
    """Apply a batch norm without updates to (B, N, h), over its channels."""
    mean, variance = running
    if training:
        variance, mean = torch.var_mean(x, (0, 1), correction=0)
    return (x - mean) * (variance + eps).rsqrt() * affine[0] + affine[1]
