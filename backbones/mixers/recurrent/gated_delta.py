"""Gated delta rule: an associative memory that decays and overwrites, run over the map both ways.

    S_t = alpha_t S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T,  o_t = S_t q_t / sqrt d
    y = W (RMSNorm(o) * SiLU(G x))

q, k and v are SiLU of a causal depthwise convolution of linear maps of x; q and k have length 1.
alpha = exp(-exp(a) softplus(A x + b)) and beta = sigmoid(B x) are one number per head. o is the sum
of both directions along the rows, which share all weights.

Source: Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule", ICLR 2025,
https://arxiv.org/abs/2412.06464, Eq. 10 and Sec. 3.3 (chunks). Widths of keys and values, kernels
of 4 and the initialisation are those of the authors' code. The paper reads text from left to right;
both directions are for maps, where no token is the last.

With 3,136 tokens and 64 channels a loop over tokens takes 7 to 9 times as long forward and 25 times
with gradients, on one core of an AMD EPYC by ``tools/benchmark.py scans train=true``.

Axes: B images (twice, for both directions), N = H W tokens, h heads, d channels of a key, e of a
value, m chunks of c tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.bounds import check_range
from backbones.layers.graph_sizes import is_exporting
from backbones.layers.heads import merge_heads, split_heads, usual_heads
from backbones.layers.scans import to_chunks
from backbones.mixer import Mixer
from backbones.registry import register_mixer

HEAD_DIM = 64
CHUNK = 32  # tokens
Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
LEAST_STEP, MOST_STEP = 1e-3, 0.1  # between which softplus(b) starts


@register_mixer("gated_delta", kind="token", source="Gated DeltaNet (ICLR 2025)")
class GatedDeltaRule(Mixer):
    """W (RMSNorm(o) * SiLU(G x)) with o of both directions; class tokens are not mixed.

    The host pools its map. The cost is linear in the number of tokens.

    Args:
        dim: Channels C.
        num_heads: h, a divisor of C; by default as many as leave each 64 channels or more.
        key_ratio: h d over C.
        value_ratio: e over d.
        kernel_size: Tokens that the causal convolutions read.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters with D = h d and E = h e: 2 C D +
    3 C E + 2 C h + k (2 D + E) + 2 h + e.

    Raises:
        ValueError: Heads that do not divide C, or keys, values or kernels below 1.

    Source: Gated DeltaNet (ICLR 2025), https://arxiv.org/abs/2412.06464.
    """

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int | None = None,
        key_ratio: float = 0.75,
        value_ratio: float = 2.0,
        kernel_size: int = 4,
    ) -> None:
        super().__init__()
        heads = usual_heads(dim, num_heads, HEAD_DIM)
        key = int(key_ratio * dim / heads)
        value = int(value_ratio * key)
        check_range("key channels of a head (key_ratio)", key, 1)
        check_range("value channels of a head (value_ratio)", value, 1)
        check_range("kernel_size", kernel_size, 1)
        self.num_heads, self.widths = heads, (heads * key, heads * key, heads * value)
        self.qkv = nn.Linear(dim, sum(self.widths), bias=False)
        width = sum(self.widths)
        self.conv = nn.Conv1d(width, width, kernel_size, groups=width, bias=False)
        self.beta, self.step = nn.Linear(dim, heads, bias=False), nn.Linear(dim, heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(0, 16).log())
        low, high = math.log(LEAST_STEP), math.log(MOST_STEP)
        steps = (torch.rand(heads) * (high - low) + low).exp()
        self.dt_bias = nn.Parameter(steps + torch.log(-torch.expm1(-steps)))
        self.rule = DeltaRule()
        self.gate = nn.Linear(dim, heads * value, bias=False)
        self.norm = nn.RMSNorm(value, eps=1e-5)
        self.proj = nn.Linear(heads * value, dim, bias=False)

    def mix(self, x: Tensor) -> Tensor:
        """Run over the rows both ways: (B, H, W, C) -> (B, H, W, C)."""
        return self.mixed(x, self.rule)

    def mixed(self, x: Tensor, rule: Rule) -> Tensor:
        """Run over the rows by a form of ``delta_rule``: (B, H, W, C) -> (B, H, W, C)."""
        tokens = x.flatten(1, 2)
        precise = torch.promote_types(x.dtype, torch.float32)
        two_ways = torch.cat([tokens, tokens.flip(1)])
        parts = F.pad(self.qkv(two_ways).mT, (self.conv.kernel_size[0] - 1, 0))
        q, k, v = (
            split_heads(part.to(precise), self.num_heads)
            for part in F.silu(self.conv(parts)).mT.split(self.widths, dim=-1)
        )
        q, k = (F.normalize(part, dim=-1, eps=1e-6) for part in (q, k))
        step = F.softplus(self.step(two_ways).to(precise) + self.dt_bias.to(precise))
        log_decay = -self.A_log.to(precise).exp() * step
        beta = self.beta(two_ways).to(precise).sigmoid()
        read = rule(q * q.shape[-1] ** -0.5, k, v, log_decay.mT, beta.mT)
        forward, backward = read.unflatten(0, (2, -1))
        normed = self.norm((forward + backward.flip(2)).to(x.dtype))
        return self.proj(merge_heads(normed) * F.silu(self.gate(tokens))).unflatten(
            1, (x.shape[1], x.shape[2])
        )


class DeltaRule(nn.Module):
    """``delta_rule`` as a part, which hooks, profilers and pictures name."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
        """Return what all tokens read: values (B, h, N, e) -> (B, h, N, e)."""
        return delta_rule(q, k, v, log_decay, beta)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """Return o_t = S_t q_t with S_t = alpha_t S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T.

    Within a chunk the values u_t that are written solve a triangular system, u_t = beta_t (v_t -
    alpha_t S_{t-1} k_t); a loop over chunks passes S on.

    Args:
        q: (B, h, N, d).
        k: (B, h, N, d).
        v: (B, h, N, e).
        log_decay: log alpha, (B, h, N).
        beta: (B, h, N).

    Returns:
        (B, h, N, e).
    """
    count = q.shape[2]
    length = min(CHUNK, count)
    # (m, c, B, h, ...) -> (B, h, m, c, ...)
    q, k, v, log_decay, beta = (
        to_chunks(x.movedim(2, 0), length).movedim((0, 1), (2, 3))
        for x in (q, k, v, log_decay, beta)
    )
    total = log_decay.cumsum(-1)
    ones = torch.ones(length, length, dtype=torch.bool, device=q.device)
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~ones.tril(), -math.inf).exp()
    since_start = total.exp().unsqueeze(-1)
    until_end = (total[..., -1:] - total).exp().unsqueeze(-1)
    writes = beta.unsqueeze(-1) * k
    system = (writes @ k.mT * between).tril(-1)
    inverse = invert_unit_lower(system)
    new_values, decayed_writes = (
        inverse @ (beta.unsqueeze(-1) * v),
        inverse @ (since_start * writes),
    )
    keys, decays = (until_end * k).mT, since_start[..., -1:, :]
    per_chunk = (
        part.flatten(0, 1).unbind(1) for part in (new_values, decayed_writes, keys, decays)
    )
    state = q.new_zeros(q.shape[0] * q.shape[1], q.shape[-1], v.shape[-1])
    states, values = [], []
    for chunk_values, share, key, decay in zip(*per_chunk, strict=True):
        states.append(state)
        values.append(torch.baddbmm(chunk_values, share, state, alpha=-1))
        state = torch.baddbmm(decay * state, key, values[-1])
    before, writes = (
        torch.stack(parts, dim=1).unflatten(0, q.shape[:2]) for parts in (states, values)
    )
    outputs = (since_start * q) @ before + (q @ k.mT * between) @ writes
    return outputs.flatten(2, 3)[:, :, :count]


def invert_unit_lower(lower: Tensor) -> Tensor:
    """Return (I + L)^-1 for strictly lower triangular L: (..., c, c) -> (..., c, c).

    ONNX lacks triangular solvers. An export joins inverses of diagonal blocks, at first of one row,
    to those of blocks twice as large: [[A, 0], [C, B]]^-1 has -B^-1 C A^-1 below its diagonal.
    """
    length = lower.shape[-1]
    identity = torch.eye(length, dtype=lower.dtype, device=lower.device)
    if not is_exporting():
        return torch.linalg.solve_triangular(
            lower, identity.expand_as(lower), upper=False, unitriangular=True
        )
    inverse, place = identity, torch.arange(length, device=lower.device)
    size = 1
    while size < length:
        block = place // size
        is_joined = (block.unsqueeze(1) % 2 == 1) & (block.unsqueeze(1) - 1 == block)
        inverse = inverse - inverse @ lower.masked_fill(~is_joined, 0.0) @ inverse
        size *= 2
    return inverse
