"""Search, solver and certificate for the Lipschitz constant of W1 phi(W0 x).

``backbones/analysis/lipschitz.py`` has the equations and their source.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import OptimizeResult, minimize
from torch import Tensor

# Widths of the soft maximum that replaces lambda_max, in units of the initial rho.
TEMPERATURES = (0.3, 0.1, 0.03, 0.01, 3e-3, 1e-3, 3e-4, 1e-4, 3e-5)
MEMORY = 20  # pairs of L-BFGS
STARTS = tuple(1 + 10.0**exponent for exponent in torch.linspace(-3, 2, 51).tolist())
REPAIRS = (0.0, *(10.0**exponent for exponent in range(-10, 0)))


class Part(NamedTuple):
    """f(x) = w1 phi(w0 x + b0) + b1 without its biases, in float64.

    w0 is (h, C) and w1 (C, h); the slopes of phi lie within p and q, (h,) each.
    """

    w0: Tensor
    w1: Tensor
    p: Tensor
    q: Tensor

    def product_bound(self) -> float:
        """Return ||W1|| ||max(|P|, |Q|) W0||."""
        steepest = torch.maximum(self.p.abs(), self.q.abs())
        return float(_norm(self.w1) * _norm(steepest[:, None] * self.w0))


@dataclass(frozen=True)
class Reduced:
    """Part with its hidden block eliminated, scaled to matrices of norm 1.

    Attributes:
        a: (j, C), rows of R W0 of the j non-linear units.
        b: (C, j), their columns of W1.
        linear: (C, C), J = W1 D W0 of all units.
        active: (h,), True for the j units.
        rho_unit: Unit of rho.
        tau_unit: Unit of tau.
    """

    a: Tensor
    b: Tensor
    linear: Tensor
    active: Tensor
    rho_unit: float
    tau_unit: float

    @classmethod
    def eliminate(cls, part: Part) -> Reduced:
        """Eliminate the hidden block of a part."""
        middle, half = (part.p + part.q) / 2, (part.q - part.p) / 2
        a, b = half[:, None] * part.w0, part.w1
        active = (a.norm(dim=1) > 0) & (b.norm(dim=0) > 0)
        a, b = a[active], b[:, active]
        linear = part.w1 @ (middle[:, None] * part.w0)
        if not active.any():
            return cls(a, b, linear, active, 1.0, 1.0)
        norm_a, norm_b = _norm(a), _norm(b)
        unit = norm_a * norm_b
        return cls(
            a / norm_a, b / norm_b, linear / unit, active, float(unit) ** 2, float(norm_b) ** 2
        )

    def quadratic_form(self, tau: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the matrix (C, C) with largest eigenvalue rho, and S^-1 J; None unless S > 0."""
        gram = torch.eye(len(self.b), dtype=tau.dtype) - (self.b / tau) @ self.b.T
        factor, failed = torch.linalg.cholesky_ex(gram)
        if failed or not tau.isfinite().all():
            return None
        solved = torch.cholesky_solve(self.linear, factor)
        return (self.a.T * tau) @ self.a + self.linear.T @ solved, solved

    def rho(self, tau: Tensor) -> float:
        """Return rho at tau (j,), inf unless S > 0 proves that it is a bound."""
        form = self.quadratic_form(tau)
        return math.inf if form is None else float(torch.linalg.eigvalsh(form[0])[-1])

    def soft_rho(self, log_tau: Tensor, width: float) -> tuple[float, Tensor, float]:
        """Return the log-sum-exp of eigenvalues over a width, its gradient in log tau, and rho."""
        tau = log_tau.exp()
        form = self.quadratic_form(tau)
        if form is None:
            return math.inf, torch.zeros_like(tau), math.inf
        matrix, solved = form
        values, vectors = torch.linalg.eigh(matrix)
        top = float(values[-1])
        weights = ((values - top) / width).exp()
        total = weights.sum()
        mask = weights > 1e-14 * total
        directions = vectors[:, mask] * (weights[mask] / total).sqrt()
        rises = (self.a @ directions).square().sum(dim=1)
        falls = (self.b.T @ (solved @ directions)).square().sum(dim=1)
        return top + width * math.log(float(total)), rises * tau - falls / tau, top

    def certify(self, tau: Tensor) -> tuple[float, Tensor]:
        """Return rho and tau (h,) in the units of the part; tau is inf for linear units."""
        everywhere = torch.full(self.active.shape, math.inf, dtype=tau.dtype)
        everywhere[self.active] = tau * self.tau_unit
        return self.rho(tau) * self.rho_unit, everywhere

    def best(self, candidates: list[Tensor]) -> Tensor:
        """Return the candidate of least rho."""
        return min(candidates, key=self.rho)

    def constants(self) -> list[Tensor]:
        """Return values of tau equal for all units, from the smallest feasible; each is a bound."""
        return [torch.full((self.a.shape[0],), start, dtype=self.a.dtype) for start in STARTS]


def search(part: Part, iterations: int) -> tuple[float, Tensor]:
    """Minimise rho(tau) by L-BFGS on log tau; returns rho and tau (h,).

    The problem is convex in log tau, but not smooth: a log-sum-exp replaces lambda_max, and its
    width goes to zero in steps.
    """
    reduced = Reduced.eliminate(part)
    best = reduced.best(reduced.constants())
    if not len(best):
        return reduced.certify(best)
    least, log_tau = reduced.rho(best), best.log()
    unit = least
    for temperature in TEMPERATURES:
        width = temperature * unit

        def evaluate(point: Tensor, width: float = width) -> tuple[float, Tensor]:
            nonlocal least, best
            value, gradient, rho = reduced.soft_rho(point, width)
            if rho < least:
                least, best = rho, point.exp()
            return value, gradient

        # The error of the soft maximum is about its width.
        log_tau = _minimise(evaluate, log_tau, iterations, tolerance=1e-4 * width)
    return reduced.certify(best)


def solve(part: Part, solver: str) -> tuple[float, Tensor]:
    """Solve the semidefinite program with cvxpy, then certify its T; returns rho and tau (h,)."""
    import cvxpy as cp

    reduced = Reduced.eliminate(part)
    if not reduced.active.any():
        return reduced.certify(reduced.a.new_ones(0))
    w0, w1 = (part.w0 / part.w0.norm()).numpy(), (part.w1 / part.w1.norm()).numpy()
    p, q = part.p.numpy(), part.q.numpy()
    t, rho = cp.Variable(len(p), nonneg=True), cp.Variable()
    cross = w0.T @ cp.diag(cp.multiply(p + q, t))
    corner = -2 * (w0.T @ cp.diag(cp.multiply(p * q, t)) @ w0) - rho * np.eye(w0.shape[1])
    matrix = cp.bmat([[corner, cross], [cross.T, w1.T @ w1 - 2 * cp.diag(t)]])
    problem = cp.Problem(cp.Minimize(rho), [(matrix + matrix.T) / 2 << 0])
    options = {"eps": 1e-6, "max_iters": 100_000} if solver == "SCS" else {}
    problem.solve(solver=solver, **options)
    candidates = reduced.constants()
    if t.value is not None:
        tau = 2 * torch.from_numpy(t.value)[reduced.active] * part.w1.norm() ** 2 / reduced.tau_unit
        tau = tau.clamp(min=1e-12)
        # A solver may stop just outside of the feasible set.
        candidates += [tau * (1 + repair) for repair in REPAIRS]
    return reduced.certify(reduced.best(candidates))


def _minimise(
    evaluate: Callable[[Tensor], tuple[float, Tensor]], x: Tensor, iterations: int, tolerance: float
) -> Tensor:
    """L-BFGS of a function that may be inf, until ten iterations gain less than ``tolerance``."""
    values = [evaluate(x)[0]]
    wall = 10 * abs(values[0]) + 1  # scipy's line search cannot reckon with inf

    def finite(point: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        value, gradient = evaluate(torch.from_numpy(point))
        return (value, gradient.numpy()) if math.isfinite(value) else (wall, np.zeros_like(point))

    def stop_when_slow(intermediate_result: OptimizeResult) -> None:
        values.append(float(intermediate_result.fun))
        if len(values) > 10 and values[-11] - values[-1] < tolerance:
            raise StopIteration

    options = {"maxiter": iterations, "maxcor": MEMORY, "maxls": 25, "ftol": 0.0, "gtol": 0.0}
    result = minimize(
        finite, x.numpy(), jac=True, method="L-BFGS-B", callback=stop_when_slow, options=options
    )
    return torch.from_numpy(result.x)


def _norm(matrix: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(matrix, 2)
