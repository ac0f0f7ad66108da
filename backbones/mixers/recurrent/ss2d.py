"""2-D selective scan: a state-space model runs over the map in four directions.

    h_t = exp(Delta_t A) * h_{t-1} + Delta_t B_t u_t,  y_t = C_t h_t + D u_t
    out = W LN(sum of the four directions)

u = SiLU(conv(V x)). The directions are rows, columns and both in reverse, each with its own A, D
and projections of u to Delta = softplus(P_d P_r u + b), B and C. Every channel has n states of its
own.

Source: Liu et al., "VMamba: Visual State Space Model", NeurIPS 2024,
https://arxiv.org/abs/2401.10166; after Gu and Dao, "Mamba", 2023,
https://arxiv.org/abs/2312.00752. One state per channel, no wider inner channels, no gate, and the
initialisation are those of VMamba-T in the authors' code. The scan is that of ``layers/scans``.

With 3,136 tokens and 64 channels a loop over tokens takes 16 times as long forward and 34 times
with gradients, on one core of an AMD EPYC by ``tools/benchmark.py scans train=true``.

Axes: B images, L = H W tokens, K = 4 directions, E inner channels, n states, r rank of Delta.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.axes import to_nchw, to_nhwc
from backbones.layers.bounds import check_range
from backbones.layers.init import init_linear
from backbones.layers.scans import Scan, scan
from backbones.mixer import Mixer
from backbones.options import check_odd
from backbones.registry import register_mixer
from backbones.slots import hidden_width

DIRECTIONS = 4
LEAST_STEP, MOST_STEP = 1e-3, 0.1  # between which softplus(b) starts


@register_mixer("ss2d", kind="token", source="VMamba (NeurIPS 2024)")
class SelectiveScan2d(Mixer):
    """W LN(four scans of SiLU(conv(V x))); class tokens are not mixed: the host pools its map.

    The cost is linear in the number of tokens.

    Args:
        dim: Channels C.
        states: n, states of a channel and direction.
        expansion: E over C.
        kernel_size: Side of the depthwise convolution, odd.
        rank: r; by default a sixteenth of C, rounded up.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters: 2 C E + k^2 E + 4 E (2 r + 3 n +
    2) + 2 E.

    Raises:
        ValueError: States, rank or E below 1.

    Source: VMamba (NeurIPS 2024), https://arxiv.org/abs/2401.10166.
    """

    # The authors mark A_logs, and Ds, a vector; their released optimiser ignores the mark.
    no_weight_decay = ("A_logs", "dt_projs_bias")

    def __init__(
        self,
        dim: int,
        *,
        states: int = 1,
        expansion: float = 1.0,
        kernel_size: int = 3,
        rank: int | None = None,
    ) -> None:
        super().__init__()
        check_odd(kernel_size)
        rank = math.ceil(dim / 16) if rank is None else rank
        check_range("states", states, 1)
        check_range("rank", rank, 1)
        inner = hidden_width(dim, expansion)
        self.parts = (rank, states, states)
        self.in_proj = nn.Linear(dim, inner, bias=False)
        reach = kernel_size // 2
        self.conv2d = nn.Conv2d(inner, inner, kernel_size, padding=reach, groups=inner, bias=False)
        self.x_proj_weight = nn.Parameter(torch.empty(DIRECTIONS, rank + 2 * states, inner))
        self.dt_projs_weight = nn.Parameter(torch.empty(DIRECTIONS, inner, rank))
        self.dt_projs_bias = nn.Parameter(torch.empty(DIRECTIONS, inner))
        self.A_logs = nn.Parameter(torch.empty(DIRECTIONS * inner, states))
        self.Ds = nn.Parameter(torch.ones(DIRECTIONS * inner))
        self.scan = SelectiveScan()
        self.out_norm = nn.LayerNorm(inner)
        self.out_proj = nn.Linear(inner, dim, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw steps between 0.001 and 0.1, log-uniform, and set A to -1, ..., -n."""
        init_linear(self.in_proj)
        init_linear(self.out_proj)
        rank, states, _ = self.parts
        limit = self.x_proj_weight.shape[-1] ** -0.5
        nn.init.uniform_(self.x_proj_weight, -limit, limit)
        nn.init.uniform_(self.dt_projs_weight, -(rank**-0.5), rank**-0.5)
        with torch.no_grad():
            self.A_logs.copy_(torch.arange(1.0, states + 1).log())
            low, high = math.log(LEAST_STEP), math.log(MOST_STEP)
            steps = (torch.rand_like(self.dt_projs_bias) * (high - low) + low).exp()
            self.dt_projs_bias.copy_(steps + torch.log(-torch.expm1(-steps)))

    def mix(self, x: Tensor) -> Tensor:
        """Scan in four directions: (B, H, W, C) -> (B, H, W, C)."""
        maps = F.silu(to_nhwc(self.conv2d(to_nchw(self.in_proj(x)))))
        merged = merge(self.scanned(along_directions(maps)), (x.shape[1], x.shape[2]))
        return self.out_proj(self.out_norm(merged.to(x.dtype)))

    def scanned(self, u: Tensor) -> Tensor:
        """Return y of each direction: (K, B, L, E) -> the same, in float32 at least."""
        projected = u.flatten(1, 2) @ self.x_proj_weight.mT
        low_rank, b, c = projected.split(self.parts, dim=-1)
        step = low_rank @ self.dt_projs_weight.mT
        precise = torch.promote_types(u.dtype, torch.float32)
        # Tokens come first in a scan: (L, K, B, ...).
        step, b, c = (
            part.to(precise).unflatten(1, u.shape[1:3]).movedim(2, 0) for part in (step, b, c)
        )
        u = u.to(precise).movedim(2, 0)
        per_direction = (DIRECTIONS, 1, u.shape[3])
        step = F.softplus(step.contiguous() + self.dt_projs_bias.to(precise).unsqueeze(1))
        a = -self.A_logs.to(precise).exp().view(*per_direction, -1)
        read = self.scan(u, step, a, b, c)
        return (read + self.Ds.to(precise).view(per_direction) * u).movedim(0, 2)


class SelectiveScan(nn.Module):
    """``selective_scan`` as a part, which hooks, profilers and pictures name."""

    def __init__(self) -> None:
        super().__init__()
        self.states = Scan()

    def forward(self, u: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        """Return what is read after each token: inputs (L, ..., E) -> (L, ..., E)."""
        return selective_scan(u, step, a, b, c, self.states)


def selective_scan(
    u: Tensor,
    step: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    scan: Callable[[Tensor, Tensor], Tensor] = scan,
) -> Tensor:
    """Return C_t h_t with h_t = exp(Delta_t A) * h_{t-1} + Delta_t B_t u_t.

    Args:
        u: (L, ..., E).
        step: Delta, (L, ..., E).
        a: A, (..., E, n).
        b: (L, ..., n).
        c: (L, ..., n).
        scan: A form of ``layers.scans.scan``.
    """
    states = scan(a * step.unsqueeze(-1), (step * u).unsqueeze(-1) * b.unsqueeze(-2))
    return (states * c.unsqueeze(-2)).sum(-1)


def along_directions(x: Tensor) -> Tensor:
    """Return the tokens of rows, of columns, and of both in reverse: (B, H, W, E) -> (4, B, L, E).

    Args:
        x: (B, H, W, E).
    """
    forward = torch.stack([x.flatten(1, 2), x.transpose(1, 2).flatten(1, 2)])
    return torch.cat([forward, forward.flip(2)])


def merge(y: Tensor, size: tuple[int, int]) -> Tensor:
    """Sum the four directions at the places of a map: (4, B, L, E) -> (B, H, W, E).

    Args:
        y: As ``along_directions`` returns it.
        size: (H, W).
    """
    rows, columns = (y[:2] + y[2:].flip(2)).unbind(0)
    return rows.unflatten(1, size) + columns.unflatten(1, size[::-1]).transpose(1, 2)
