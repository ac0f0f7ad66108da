"""Compare numbers of a fast form with those of the equation in 64 bits."""

from __future__ import annotations

import math
from collections.abc import Iterable
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


def largest_difference(results: Iterable[Result]) -> Difference:
    """Return the largest of all differences; NaN is larger than any number."""
    differences = [_difference(*result) for result in results]
    return max(differences, key=lambda d: math.inf if math.isnan(d.share) else d.share)


def _difference(name: str, computed: Tensor, expected: Tensor, least: float) -> Difference:
    assert computed.shape == expected.shape, name
    apart = (computed.double() - expected).abs()
    index = int(apart.argmax())
    place = tuple(int(part) for part in torch.unravel_index(torch.tensor(index), apart.shape))
    share = apart.flatten()[index] / expected.abs().max().clamp(min=least)
    numbers = (float(part.flatten()[index]) for part in (computed, expected))
    return Difference(name, float(share), place, *numbers)
