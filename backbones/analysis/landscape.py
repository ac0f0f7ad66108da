"""Surface of an objective around trained weights, and its largest curvature.

Source: Li et al., "Visualizing the Loss Landscape of Neural Nets", NeurIPS 2018,
https://arxiv.org/abs/1712.09913, Sec. 4 (directions normalised per filter; norms, biases and other
vectors stay) and Eq. 1; Yao et al., "PyHessian", 2020, https://arxiv.org/abs/1912.07145, Alg. 1
(power iteration). Products with the Hessian are differences of gradients,
(g(w + e v) - g(w - e v)) / 2 e, since some kernels of attention lack a second derivative; networks
should therefore be in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Objective = Callable[[], Tensor]
STEP = 1e-4  # e, for directions of length 1


def filter_normalised(parameters: Sequence[Tensor], seed: int) -> list[Tensor]:
    """Return a random direction with filters of the same norms as those of the weights.

    A filter is a row of a matrix or convolution, which computes one output. Parameters of one axis
    get zeros.
    """
    generator = torch.Generator().manual_seed(seed)
    directions = []
    for parameter in parameters:
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        noise = noise.to(parameter)
        if parameter.ndim < 2:
            directions.append(torch.zeros_like(parameter))
            continue
        lengths, norms = (t.detach().flatten(1).norm(dim=1) for t in (noise, parameter))
        factor = (norms / lengths.clamp(min=1e-12)).view(-1, *[1] * (parameter.ndim - 1))
        directions.append(noise * factor)
    return directions


@contextmanager
def moved(
    parameters: Sequence[Tensor], steps: Sequence[tuple[float, Sequence[Tensor]]]
) -> Iterator[None]:
    """Move the parameters inside the context, and restore them to the bit afterwards."""
    originals = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for length, direction in steps:
            for parameter, part in zip(parameters, direction, strict=True):
                parameter.add_(part, alpha=length)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, originals, strict=True):
                parameter.copy_(value)


@torch.no_grad()
def surface(
    network: nn.Module, objective: Objective, points: Sequence[float], seed: int = 0
) -> Tensor:
    """Return the objective at w + a d1 + b d2 for all a (rows) and b (columns): (points, points).

    Args:
        network: Network with the parameters w; unchanged afterwards.
        objective: Function of the parameters.
        points: Values of a and b.
        seed: Seed of the two directions.
    """
    parameters = list(network.parameters())
    first, second = (filter_normalised(parameters, 2 * seed + turn) for turn in (0, 1))
    values = torch.zeros(len(points), len(points), dtype=torch.float64)
    for row, a in enumerate(points):
        for column, b in enumerate(points):
            with moved(parameters, [(a, first), (b, second)]):
                values[row, column] = float(objective())
    return values


def largest_curvature(
    network: nn.Module, objective: Objective, iterations: int = 20, seed: int = 0
) -> tuple[float, float]:
    """Compute the eigenvalue of the Hessian with the largest magnitude, by power iteration.

    Args:
        network: Network in float64.
        objective: Function of its parameters.
        iterations: Maximum; iterations end when the value changes by less than 0.1 %.
        seed: Seed of the initial direction.

    Returns:
        The eigenvalue, and its relative change in the last iteration.
    """
    parameters = [p for p in network.parameters() if p.numel()]
    states = [p.requires_grad for p in parameters]
    generator = torch.Generator().manual_seed(seed)
    direction = [
        torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p) for p in parameters
    ]
    value, change = 0.0, float("inf")
    for parameter in parameters:
        parameter.requires_grad_(True)
    try:
        for _ in range(iterations):
            direction = _unit(direction)
            ahead = _gradient(parameters, objective, direction, STEP)
            behind = _gradient(parameters, objective, direction, -STEP)
            product = [(a - b) / (2 * STEP) for a, b in zip(ahead, behind, strict=True)]
            before, value = value, _dot(direction, product)
            change = abs(value - before) / max(abs(value), 1e-12)
            direction = product
            if change < 1e-3 or not value:
                break
    finally:
        for parameter, state in zip(parameters, states, strict=True):
            parameter.requires_grad_(state)
    return value, change


def _gradient(
    parameters: Sequence[Tensor], objective: Objective, direction: Sequence[Tensor], step: float
) -> list[Tensor]:
    with moved(parameters, [(step, direction)]), torch.enable_grad():
        value = objective()
        gradients = torch.autograd.grad(value, list(parameters), allow_unused=True)
    pairs = zip(gradients, parameters, strict=True)
    return [torch.zeros_like(p) if g is None else g.detach() for g, p in pairs]


def _dot(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    return sum(float((a * b).sum()) for a, b in zip(first, second, strict=True))


def _unit(direction: Sequence[Tensor]) -> list[Tensor]:
    length = max(_dot(direction, direction) ** 0.5, 1e-300)
    return [part / length for part in direction]
