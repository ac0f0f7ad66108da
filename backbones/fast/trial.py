"""Compare numbers of a fast form with those of the equation in 64 bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class Result(NamedTuple):
    """An output or gradient of a fast form.

    Attributes:
        name: In messages, such as "gradient of W1".
        computed: By the fast form.
        expected: By the equation, in float64.
        least: Differences are divided by the largest expected number, and at least by this.
    """

    name: str
    computed: Tensor
    expected: Tensor
    least: float = 1.0


class Difference(NamedTuple):
    """The largest difference of a result, over its largest number, and where it is."""

    name: str
    share: float
    place: tuple[int, ...]
    computed: float
    expected: float

    def __str__(self) -> str:
        """Return one sentence."""
        return (
            f"{self.name} differs by {self.share:.1e} of its largest number, at {[*self.place]}: "
            f"{self.computed:.4g} instead of {self.expected:.4g}"
        )


@torch.enable_grad()
def compare(
    form: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    inputs: Mapping[str, Tensor],
    device: torch.device,
    dtype: torch.dtype,
) -> list[Result]:
    """Return the output and the gradients of all inputs, by a form and by torch's operations.

    Args:
        form: What is tried, in ``dtype``.
        reference: The same equation, in float64.
        inputs: Arguments of both with their names.
        device: Where both compute.
        dtype: A floating type.
    """
    computed, expected = (
        [x.to(device, dtype).to(kind).requires_grad_() for x in inputs.values()]
        for kind in (dtype, torch.float64)
    )
    computed_result, expected_result = form(*computed), reference(*expected)
    weights = torch.linspace(-1, 1, expected_result.numel(), device=device, dtype=dtype).view_as(
        expected_result
    )
    gradients = zip(
        inputs,
        torch.autograd.grad(computed_result, computed, weights),
        torch.autograd.grad(expected_result, expected, weights.double()),
        strict=True,
    )
    return [
        Result("output", computed_result.detach(), expected_result.detach()),
        *(Result(f"gradient of {name}", first, second) for name, first, second in gradients),
    ]


def largest_difference(results: Iterable[Result]) -> Difference:
    """Return the largest of all differences; NaN is larger than any number."""
    differences = [_difference(*result) for result in results]
    return max(differences, key=lambda d: math.inf if math.isnan(d.share) else d.share)


def _difference(name: str, computed: Tensor, expected: Tensor, least: float) -> Difference:
    assert computed.shape == expected.shape, name
    error = (computed.double() - expected).abs()
    index = int(error.argmax())
    place = tuple(int(part) for part in torch.unravel_index(torch.tensor(index), error.shape))
    share = error.flatten()[index] / expected.abs().max().clamp(min=least)
    numbers = (float(part.flatten()[index]) for part in (computed, expected))
    return Difference(name, float(share), place, *numbers)
