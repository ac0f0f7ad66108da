"""The recurrence s_t = a_t s_{t-1} + b_t and its gradients as an operator of Triton kernels.

Tokens are cut into chunks. A first kernel computes the state that each chunk leaves behind if it
begins with zero, a second the state that each one begins with and all states from there, lane by
lane. With g_t = ds_t + a_{t+1} g_{t+1}, which is the same recurrence from the last token back, the
gradients are db_t = g_t and d log a_t = g_t a_t s_{t-1}. States are float32, or float64 where the
tensors are.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import Library

MAX_LANES = 128  # of a program
THREADS = 2**18  # that fill a large GPU
LEAST_CHUNK = 16  # tokens
SCHEMAS = (
    "linear_scan(Tensor log_decay, Tensor values) -> Tensor",
    "linear_scan_backward(Tensor grad, Tensor log_decay, Tensor states) -> (Tensor, Tensor)",
)


@triton.jit
def _end_chunks(
    log_decay, values, totals, ends, count, lanes, length,
    BACKWARD: tl.constexpr, LANES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Store the summed exponents and the last state of each chunk, (chunks, lanes)."""
    chunk = tl.program_id(1)
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES).to(tl.int64)
    inside = lane < lanes
    first = tl.zeros([LANES], tl.int64)  # addresses may exceed 32 bits
    state = tl.zeros([LANES], ACC)
    total = tl.zeros([LANES], ACC)
    for step in range(chunk * length, tl.minimum(count, (chunk + 1) * length)):
        token = first + (count - 1 - step if BACKWARD else step)
        # Backward, a state decays by the number of the token after it; the last one decays by zero.
        decay_of = token + 1 if BACKWARD else token
        at = inside & (decay_of < count)
        exponent = tl.load(log_decay + decay_of * lanes + lane, mask=at, other=0.0).to(ACC)
        value = tl.load(values + token * lanes + lane, mask=inside, other=0.0).to(ACC)
        state = tl.exp(exponent) * state + value
        total += exponent
    place = (first + chunk) * lanes + lane
    tl.store(totals + place, total, mask=inside)
    tl.store(ends + place, state, mask=inside)


@triton.jit
def _scan(
    log_decay, values, totals, ends, states, out, out_decay, count, lanes, length,
    BACKWARD: tl.constexpr, LANES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Store all states; backward, store both gradients and read the states of the forward pass."""
    chunk = tl.program_id(1)
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES).to(tl.int64)
    inside = lane < lanes
    first = tl.zeros([LANES], tl.int64)  # addresses may exceed 32 bits
    state = tl.zeros([LANES], ACC)
    for before in range(0, chunk):
        place = (first + before) * lanes + lane
        total = tl.load(totals + place, mask=inside, other=0.0)
        state = tl.exp(total) * state + tl.load(ends + place, mask=inside, other=0.0)
    for step in range(chunk * length, tl.minimum(count, (chunk + 1) * length)):
        token = first + (count - 1 - step if BACKWARD else step)
        decay_of = token + 1 if BACKWARD else token
        at = inside & (decay_of < count)
        exponent = tl.load(log_decay + decay_of * lanes + lane, mask=at, other=0.0).to(ACC)
        place = token * lanes + lane
        value = tl.load(values + place, mask=inside, other=0.0).to(ACC)
        state = tl.exp(exponent) * state + value
        tl.store(out + place, state, mask=inside)
        if BACKWARD:
            decay = tl.exp(tl.load(log_decay + place, mask=inside, other=0.0).to(ACC))
            earlier = inside & (token > 0)
            previous = tl.load(states + place - lanes, mask=earlier, other=0.0).to(ACC)
            tl.store(out_decay + place, state * decay * previous, mask=inside)


def forward(log_decay: Tensor, values: Tensor) -> Tensor:
    """Return all states, (n, ...), of two of the same shape and type."""
    states = torch.empty_like(values, memory_format=torch.contiguous_format)
    _launch(log_decay.contiguous(), values.contiguous(), states, states, states, backward=False)
    return states


def backward(grad: Tensor, log_decay: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of log_decay and of values."""
    of_values, of_decay = torch.empty_like(states), torch.empty_like(states)
    _launch(log_decay.contiguous(), grad.contiguous(), states, of_values, of_decay, backward=True)
    return of_decay, of_values


def _launch(
    log_decay: Tensor, values: Tensor, states: Tensor, out: Tensor, out_decay: Tensor,
    *, backward: bool,
) -> None:  # fmt: skip
    """Run both kernels, the first one only where there are several chunks."""
    count, lanes = len(values), values[:1].numel()
    if not values.numel():
        return
    block = min(MAX_LANES, triton.next_power_of_2(lanes))
    chunks = max(1, min(THREADS // lanes, count // LEAST_CHUNK))
    length = triton.cdiv(count, chunks)
    grid = (triton.cdiv(lanes, block), triton.cdiv(count, length))
    is_double = values.dtype is torch.float64
    kinds = (backward, block, tl.float64 if is_double else tl.float32)
    precise = torch.float64 if is_double else torch.float32
    totals, ends = torch.empty(2, grid[1], lanes, device=values.device, dtype=precise)
    sizes = (count, lanes, length)
    warps = max(1, block // 32)
    with torch.cuda.device_of(values):  # Triton itself launches on the current device
        if grid[1] > 1:
            _end_chunks[grid](log_decay, values, totals, ends, *sizes, *kinds, num_warps=warps)
        _scan[grid](
            log_decay, values, totals, ends, states, out, out_decay, *sizes, *kinds,
            num_warps=warps,
        )  # fmt: skip


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    gradients: tuple[Tensor, Tensor] = torch.ops.mixerlab.linear_scan_backward(
        grad, *ctx.saved_tensors
    )
    return gradients


library = Library("mixerlab", "FRAGMENT")
for schema in SCHEMAS:
    library.define(schema)
library.impl("linear_scan", forward, "CUDA")
library.impl("linear_scan_backward", backward, "CUDA")
torch.library.register_fake(
    "mixerlab::linear_scan",
    lambda log_decay, values: torch.empty_like(values, memory_format=torch.contiguous_format),
    lib=library,
)
torch.library.register_fake(
    "mixerlab::linear_scan_backward",
    lambda grad, log_decay, states: (torch.empty_like(states), torch.empty_like(states)),
    lib=library,
)
torch.library.register_autograd(
    "mixerlab::linear_scan", _differentiate, setup_context=_keep, lib=library
)
