"""Compare operators that have just been compiled with torch's numbers: compilers err, too.

usage: python -m backbones.fast.compiled_trial FILE

Prints how they differ, or an empty line.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from backbones.fast import mixer_trial
from backbones.fast.trial import Result, largest_difference

# Of the largest number of each result. Float32 is compared with torch's in 64 bits.
LIMITS = {torch.float64: 1e-9, torch.float32: 2e-5}
# Channels that fill whole registers, half of one and some numbers; odd numbers of tokens.
BATCH, HEIGHT, WIDTH, DIM, RANK = 3, 5, 7, 29, 11
EPS = 1e-5


def find_difference(path: str) -> str:
    """Load a library and return which operator differs in what, or an empty string.

    Raises:
        OSError: It cannot be loaded.
    """
    torch.ops.load_library(path)
    for dtype, limit in LIMITS.items():
        difference = largest_difference(results(dtype))
        if not difference.share <= limit:
            return f"{difference} (in {str(dtype)[6:]})"
    return ""


@torch.no_grad()
def results(dtype: torch.dtype) -> Iterator[Result]:
    """Compute outputs and gradients of all operators in a type."""
    yield from mixer_trial.results(dtype)
    for name, arguments, expected in _cases(torch.Generator().manual_seed(0)):
        computed = getattr(torch.ops.mixerlab, name)(*_cast(arguments, dtype))
        for index, pair in enumerate(zip(_tensors(computed), _tensors(expected), strict=True)):
            yield Result(f"{name}: result {index}", *pair, least=0.0)


def _cases(generator: torch.Generator) -> Iterator[tuple[str, list[Any], Any]]:
    """Yield operators' names, arguments and results in torch's operations, in 64 bits."""

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    size = (BATCH, HEIGHT, WIDTH)
    x, grad = make(*size, DIM), make(*size, 2 * DIM)
    weight, bias = make(2 * DIM, DIM) / DIM**0.5, make(2 * DIM)
    y = F.linear(x, weight, bias)
    yield "linear", [x, weight, bias], y
    of_weight = grad.flatten(0, 2).t() @ x.flatten(0, 2)
    yield "linear_backward", [grad, x, weight, True, True], (grad @ weight, of_weight)
    left_factor, right_factor, shift = make(BATCH, RANK, DIM), make(BATCH, DIM, WIDTH), make(RANK)
    yield "batched", [left_factor, right_factor, shift], left_factor @ right_factor + shift[:, None]

    kernel, row_bias = make(2 * DIM, 1, 3, 3), make(2 * DIM)
    yield "conv_pos_enc", [y, kernel, row_bias], y + _depthwise(y, kernel, row_bias)

    layers = [(weight, bias), *((make(DIM, DIM) / DIM**0.5, make(DIM)) for _ in range(3))]
    layers.append((make(DIM), make(DIM)))
    read, write = make(RANK, HEIGHT, WIDTH), make(RANK, HEIGHT, WIDTH)
    p, q = _depthwise(y, kernel, row_bias).chunk(2, dim=-1)
    expected = F.linear(torch.einsum("mhw,bhwc->bmc", read, p), layers[1][0])
    star = F.silu(torch.einsum("mhw,bmc->bhwc", write, expected) + layers[1][1])
    star = F.layer_norm(star * F.linear(q, *layers[2]), (DIM,), *layers[4], EPS)
    weights, biases = (list(some) for some in zip(*layers, strict=True))
    arguments = [x, weights, biases, kernel, row_bias, read, write, EPS]
    yield "star_mixer", arguments, F.silu(F.linear(x, *layers[3])) * star


def _depthwise(x: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
    """Convolve maps (B, H, W, C), each channel by itself."""
    y = F.conv2d(x.permute(0, 3, 1, 2), kernel, bias, padding=1, groups=x.shape[-1])
    return y.permute(0, 2, 3, 1)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Return arguments with all tensors in a type."""
    if isinstance(value, Tensor):
        return value.to(dtype).contiguous()
    return [_cast(item, dtype) for item in value] if isinstance(value, list) else value


def _tensors(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


def main() -> int:
    """Run the command and return its exit status."""
    print(find_difference(sys.argv[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
