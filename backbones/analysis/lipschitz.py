"""Upper bounds on the Lipschitz constant of a channel mixer, each with a certificate.

For f(x) = W1 phi(W0 x + b0) + b1 whose hidden unit j has slopes within [p_j, q_j] the bound is the
square root of the least rho for which a diagonal T >= 0 gives

    [ -2 W0' P T Q W0 - rho I   W0' (P + Q) T  ]
    [  T (P + Q) W0             -2 T + W1' W1  ]  <= 0.

For an AFFN with N branches, ``form="joint"`` stacks W0 N times and uses all of W1 at once;
``form="split"`` bounds each branch alone and adds the N bounds, which is never less.

Source: Xu et al., "Enhancing Vision Transformer: Amplifying Non-Linearity in Feedforward Network
Module", ICML 2024, Lemma 4.2 and Theorem 4.3, after Fazlyab et al., "Efficient and Accurate
Estimation of Lipschitz Constants for Deep Neural Networks", NeurIPS 2019. Where we differ:

* Eq. 9 combines W1' W1 with a T of one branch's size; as in the proof W1 means the branch's own
  part. One T for all branches is unnecessary and only loosens the bound.
* Slopes differ per channel, like alpha and beta, so p and q are vectors here.
* The joint form is ours; the paper's is the split one.
* The theorem omits batch norms. In evaluation they are affine maps, which are merged.

Without a solver (``method="reduced"``) the hidden block is eliminated first: with tau = 2 T,
D = (P + Q) / 2, R = (Q - P) / 2 and J = W1 D W0,

    rho(tau) = lambda_max(W0' R^2 diag(tau) W0 + J' S^-1 J),  S = I - W1 diag(1 / tau) W1' > 0.

Its minimum is the optimum of the program above, and its value at any tau with S > 0 is a valid
bound. It also certifies a solver's answer: only its T is used, and rho(2 T) is reported.

Axes: C channels, h hidden channels.
"""

from __future__ import annotations

import copy
import importlib.util
import math
import time
from dataclasses import dataclass
from typing import Literal, cast

import torch
from timm.layers import Mlp
from torch import Tensor, nn

from backbones.analysis.lipschitz_search import Part, search, solve
from backbones.layers.bounds import check_range
from backbones.layers.norms import scale_and_shift
from backbones.mixer import class_name
from backbones.mixers.ffn import FFN
from backbones.mixers.iffn import IFFN
from backbones.mixers.iffn.activations import BASES, Arb, Base, RPReLU, scaled_slopes
from backbones.options.values import check_value

Method = Literal["auto", "sdp", "reduced"]
Form = Literal["joint", "split"]
Solver = Literal["CLARABEL", "SCS"]
SMALL = 40  # channels, hidden ones included, up to which a solver takes seconds
TIMM_BASES = {nn.ReLU: "relu", nn.SiLU: "silu", nn.ELU: "elu", nn.Softplus: "softplus"}
GELU_TANH = (-0.128995, 1.128995)  # slopes of GELU's approximation by a tanh, rounded outwards


@dataclass(frozen=True)
class LipschitzBound:
    """Bound with its certificate.

    Attributes:
        bound: ||f(x) - f(y)|| <= bound ||x - y|| for all tokens x and y.
        rho: Square of the bound of each part: one for "joint", N for "split".
        tau: 2 diag(T) (h,) of each part, with which rho follows from the weights alone; inf for
            units that are linear or without effect.
        form: "joint" or "split".
        method: "sdp" or "reduced", the method used.
        product: The usual bound ||W1|| ||max(|P|, |Q|) W0||, for comparison.
        certified: Always true: answers with a non-positive S are discarded.
        seconds: Time of the search.
    """

    bound: float
    rho: tuple[float, ...]
    tau: tuple[Tensor, ...]
    form: Form
    method: Method
    product: float
    certified: bool
    seconds: float


def lipschitz_bound(
    mixer: nn.Module,
    method: Method = "auto",
    form: Form = "joint",
    solver: Solver = "CLARABEL",
    residual: bool = False,
    *,
    iterations: int = 600,
) -> LipschitzBound:
    """Bound the Lipschitz constant of a mixer in the Euclidean norm of a token.

    Args:
        mixer: ``affn``, ``iffn_bn`` without spatial part, ``ffn``, or the FFN of a timm host, on
            any device, its batch norms in evaluation mode.
        method: "sdp" solves the semidefinite program with cvxpy, "reduced" minimises the reduced
            form and scales to real widths; "auto" chooses the former up to 8 channels (with 4
            times as many hidden ones).
        form: "joint", or the paper's "split".
        solver: Solver of cvxpy, "CLARABEL" or "SCS".
        residual: Bound x + f(x), which adds 1. A norm before f is excluded.
        iterations: Maximum steps of the reduced form per temperature, of which it has nine. Fewer
            steps loosen the bound, which stays valid.

    Raises:
        ValueError: Another kind of mixer, one with a spatial part, a batch norm in training mode,
            NaN or infinite weights, unknown method, form or solver, or "sdp" without cvxpy.
    """
    check_value("method", method, Method)
    check_value("form", form, Form)
    check_value("solver", solver, Solver)
    check_range("iterations", iterations, 1)
    branches = mixer_parts(mixer)
    stacked = _stack(branches)
    if not all(tensor.isfinite().all() for tensor in stacked):
        raise ValueError("the bound needs finite weights; this mixer has NaN or infinite ones")
    has_cvxpy = importlib.util.find_spec("cvxpy") is not None
    if method == "auto":
        method = "sdp" if has_cvxpy and sum(stacked.w0.shape) <= SMALL else "reduced"
    if method == "sdp" and not has_cvxpy:
        raise ValueError(
            'method sdp needs cvxpy and its solvers: pip install "mixerlab[lipschitz]"; or use '
            "method=reduced"
        )
    start = time.perf_counter()
    parts = [stacked] if form == "joint" else branches
    solutions = [solve(p, solver) if method == "sdp" else search(p, iterations) for p in parts]
    return LipschitzBound(
        bound=sum(math.sqrt(rho) for rho, _ in solutions) + residual,
        rho=tuple(rho for rho, _ in solutions),
        tau=tuple(tau for _, tau in solutions),
        form=form,
        method=method,
        product=stacked.product_bound() + residual,
        certified=all(math.isfinite(rho) for rho, _ in solutions),
        seconds=time.perf_counter() - start,
    )


@torch.no_grad()
def mixer_parts(mixer: nn.Module) -> list[Part]:
    """Return weights and slopes of each branch of a mixer, with its batch norms merged.

    Raises:
        ValueError: A mixer of another form, or with batch norms in training mode.
    """
    reason = _why_unbounded(mixer)
    if reason is not None:
        raise ValueError(reason)
    mixer = copy.deepcopy(mixer).double().cpu().requires_grad_(False)
    if isinstance(mixer, IFFN):
        return _branches(mixer)
    ffn = cast("FFN | Mlp", mixer)
    w0, w1 = (cast("nn.Linear", layer).weight.flatten(1) for layer in (ffn.fc1, ffn.fc2))
    low, high = BASES[ffn.act][1:] if isinstance(ffn, FFN) else _slopes_of_timm(ffn.act)
    return [Part(w0, w1, torch.full_like(w0[:, 0], low), torch.full_like(w0[:, 0], high))]


def _branches(mixer: IFFN) -> list[Part]:
    scale_mid, _ = scale_and_shift(mixer.bn_mid, mixer.fc2.weight)
    scale_out, _ = scale_and_shift(mixer.bn_out, mixer.fc2.weight.T)
    width = mixer.fc1.out_features
    parts = []
    for module, w1, scale in zip(
        mixer.branches,
        (scale_out[:, None] * mixer.fc2.weight).split(width, dim=1),
        scale_mid.split(width),
        strict=True,
    ):
        slopes = scaled_slopes(cast("Base | Arb | RPReLU", module).slopes(), scale)
        parts.append(Part(mixer.fc1.weight, w1, *slopes))
    return parts


def _stack(parts: list[Part]) -> Part:
    """Return the branches as one part: W0 stacked N times, all of W1."""
    w0, w1, p, q = zip(*parts, strict=True)
    return Part(torch.cat(w0), torch.cat(w1, dim=1), torch.cat(p), torch.cat(q))


def _slopes_of_timm(act: nn.Module) -> tuple[float, float]:
    if isinstance(act, nn.GELU):
        return GELU_TANH if act.approximate == "tanh" else BASES["gelu"][1:]
    return BASES[TIMM_BASES[type(act)]][1:]


def _why_unbounded(mixer: nn.Module) -> str | None:
    """Return the reason for which a mixer is unbounded; None for a bounded one."""
    if isinstance(mixer, IFFN) and mixer.dw is not None:
        return (
            "the bound holds for mixers that treat every token alone, not for an IFFN with a "
            "spatial part; use affn, or iffn_bn with spatial=False"
        )
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training for m in mixer.modules()):
        return "a batch norm in training mode depends on all tokens; call mixer.eval() first"
    if not isinstance(mixer, IFFN | FFN | Mlp):
        return (
            f"the bound is unknown for {class_name(mixer)}; use affn, iffn_bn with spatial=False, "
            "ffn or the FFN of a timm host"
        )
    if isinstance(mixer, IFFN) and not (mixer.ln_mid is None and mixer.ln_out is None):
        return (
            "the bound holds for batch norms, which are affine maps in evaluation, not for layer "
            "norms; use norm=batch"
        )
    if isinstance(mixer, FFN) and mixer.act not in BASES:
        return f"act={mixer.act} has slopes without limit, so no bound exists"
    if isinstance(mixer, Mlp) and not isinstance(mixer.norm, nn.Identity):
        return "the bound is unknown for an FFN with a norm inside"
    if isinstance(mixer, Mlp) and type(mixer.act) not in {*TIMM_BASES, nn.GELU}:
        return f"the slopes of {type(mixer.act).__name__} are unknown"
    return None
