"""AFBO's and IFFN's signatures and gradients without a compiled library.

``csrc`` has the same; both are held together by a test.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import Library

GATED = (
    "SymInt prefix, SymInt height, SymInt width, Tensor[] weights, int[] blocks, "
    "Tensor? before_a, Tensor? before_b, Tensor kernel_a, Tensor kernel_b, Tensor? own_a, "
    "Tensor? own_b, Tensor proj"
)
BRANCHED = (
    "SymInt height, SymInt width, Tensor w1, Tensor b1, Tensor[] coefficients, Tensor[] norms"
)
OPTIONS = "float eps_mid, float eps_dw, bool training, Tensor kernel, Tensor own, Tensor w2"
SCHEMAS = (
    f"gated_mixer(Tensor tokens, {GATED}, Tensor? proj_bias, bool keep) -> (Tensor, Tensor)",
    f"gated_mixer_backward(Tensor grad, Tensor kept, Tensor tokens, {GATED}) "
    "-> (Tensor, Tensor[], Tensor, Tensor, Tensor, Tensor)",
    f"branched_mixer(Tensor tokens, {BRANCHED}, Tensor[] running, {OPTIONS}, Tensor b2, bool keep) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    "branched_mixer_backward(Tensor grad, Tensor z, Tensor u, Tensor statistics, Tensor tokens, "
    f"{BRANCHED}, {OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
BATCHES = ("Batched", "FuncTorchBatched")  # torch's keys of batched tensors
_libraries: list[Library] = []  # what they register lasts as long as they do


def define() -> None:
    """Define both operators and their gradients."""
    library = Library("mixerlab", "FRAGMENT")
    _libraries.append(library)
    for schema in SCHEMAS:
        library.define(schema)
    for name, setup, backward in (
        ("gated_mixer", _keep_gated, _gated_backward),
        ("branched_mixer", _keep_branched, _branched_backward),
    ):
        torch.library.register_autograd(
            f"mixerlab::{name}", backward, setup_context=setup, lib=library
        )


def _check(grad: Tensor, kept: Tensor, tokens: Tensor, name: str) -> None:
    """Refuse gradients that the operators do not have."""
    keys = torch._C._dispatch_keys(grad)
    if any(keys.has(key) for key in BATCHES):
        raise RuntimeError(
            f"mixerlab::{name} has no gradients in many directions at once; compute what shall be "
            "differentiated so under `with backbones.fast.switched_off():`"
        )
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"mixerlab::{name} has no second derivative; compute what shall be differentiated "
            "twice under `with backbones.fast.switched_off():`"
        )
    if kept.shape[0] != tokens.shape[0]:
        raise RuntimeError(f"mixerlab::{name} has no gradient where keep is false")


def _keep_gated(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tokens, *numbers, weights, blocks = inputs[:6]
    tensors = inputs[6:13]  # biases before, kernels, own biases, W3
    ctx.numbers, ctx.blocks, ctx.has_bias = numbers, blocks, inputs[13] is not None
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1], tokens, *tensors, *weights)


def _gated_backward(ctx: Any, grad: Tensor | None, _kept: Tensor | None) -> tuple[Any, ...]:
    kept, tokens, *tensors = ctx.saved_tensors
    tensors, weights = tensors[:7], tensors[7:]
    if grad is None:
        return (None, None, None, None, [None] * len(weights), *([None] * 10))
    _check(grad, kept, tokens, "gated_mixer")
    grad = grad.contiguous()
    x, of_weights, before, taps, own, proj = torch.ops.mixerlab.gated_mixer_backward(
        grad, kept, tokens, *ctx.numbers, weights, ctx.blocks, *tensors
    )
    parts = [*before, *(_as_kernel(part, tensors[2]) for part in taps), *own]
    given = [part if t is not None else None for part, t in zip(parts, tensors[:6], strict=True)]
    bias = grad.sum((0, 1)) if ctx.has_bias else None
    return (x, None, None, None, list(of_weights), None, *given, proj, bias, None)


def _keep_branched(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tokens, height, width, w1, b1, coefficients, norms, running = inputs[:8]
    ctx.size, ctx.options, ctx.running = (height, width), inputs[8:11], len(running)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[1:], tokens, w1, b1, *inputs[11:14], *norms, *coefficients)


def _branched_backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    z, u, statistics, tokens, w1, b1, kernel, own, w2, *lists = ctx.saved_tensors
    norms, coefficients = lists[:4], lists[4:]
    if grad is None:
        empty = [None] * len(coefficients), [None] * 4, [None] * ctx.running
        return (None, None, None, None, None, *empty, *([None] * 8))
    _check(grad, z, tokens, "branched_mixer")
    grad = grad.contiguous()
    x, of_w1, of_b1, rows, of_w2 = torch.ops.mixerlab.branched_mixer_backward(
        grad, z, u, statistics, tokens, *ctx.size, w1, b1, coefficients, norms, *ctx.options,
        kernel, own, w2,
    )  # fmt: skip
    width = w1.shape[0]
    of_coefficients = [
        rows[i % 4].narrow(0, width * (i // 4), width) for i in range(len(coefficients))
    ]
    taps = _as_kernel(rows[9:], kernel)
    lists = [of_coefficients, [*rows[4:8]], [None] * ctx.running]
    bias = grad.sum((0, 1))
    return (x, None, None, of_w1, of_b1, *lists, None, None, None, taps, rows[8], of_w2, bias, None)


def _as_kernel(taps: Tensor, kernel: Tensor) -> Tensor:
    """Reshape taps (9, h) to a kernel (h, 1, 3, 3)."""
    return taps.t().reshape(kernel.shape)
