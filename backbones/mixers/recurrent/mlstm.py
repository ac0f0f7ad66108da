"""mLSTM with a matrix memory, run over the map row by row; odd blocks start at the last token.

    C_t = sigma(f_t) C_{t-1} + e^{i_t} v_t k_t^T,  n_t = sigma(f_t) n_{t-1} + e^{i_t} k_t
    h_t = C_t q_t / max(|n_t^T q_t|, 1)
    y = W (((1 + g) LN(h) + b + s * u) * SiLU(z)),  u = SiLU(conv(m)),  (m, z) = V x

q and k are block-diagonal maps of u, v of m, k divided by sqrt d. The gates i and f are linear in
(q, k, v). LN acts on each head. conv is a depthwise 3x3 convolution.

Source: Alkin et al., "Vision-LSTM: xLSTM as Generic Vision Backbone", ICLR 2025,
https://arxiv.org/abs/2406.04303, Sec. 3; Beck et al., "xLSTM", NeurIPS 2024,
https://arxiv.org/abs/2405.04517, Eq. 19 to 27. Twice as wide inner channels, four heads, blocks of
four channels and the initialisation are those of the authors' second version, without the 1e-6 that
it adds to the denominator.

With 3,136 tokens and 64 channels a loop over tokens takes 8 times as long forward and 30 times with
gradients, on one core of an AMD EPYC by ``tools/benchmark.py scans train=true``.

Axes: B images, N = H W tokens, E inner channels, h heads of d channels, m chunks of c tokens.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.axes import to_nchw, to_nhwc
from backbones.layers.bounds import check_divisor
from backbones.layers.graph_sizes import is_exporting
from backbones.layers.heads import merge_heads, split_heads
from backbones.mixer import Mixer
from backbones.options import check_odd
from backbones.registry import register_mixer
from backbones.slots import Slot, hidden_width

HEADS = 4
QKV_BLOCK = 4  # channels
CHUNK = 64  # tokens


@register_mixer("mlstm", kind="token", source="Vision-LSTM (ICLR 2025)")
class VisionLSTM(Mixer):
    """W ((LN(h) + s * u) * SiLU(z)) with mLSTM's h; class tokens are not mixed.

    The host pools its map. The cost is linear in the number of tokens.

    Args:
        dim: Channels C.
        slot: Place in the host; odd blocks run from the last token to the first.
        expansion: E over C.
        kernel_size: Side of the depthwise convolution, odd.
        num_heads: h, a divisor of E; by default the greatest common divisor of 4 and E.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters with E = 2 C, h = 4, blocks of 4
    and 3x3: 6 C^2 + 109 C + 8.

    Raises:
        ValueError: Heads that do not divide E.

    Source: Vision-LSTM (ICLR 2025), https://arxiv.org/abs/2406.04303.
    """

    def __init__(
        self,
        dim: int,
        *,
        slot: Slot | None = None,
        expansion: float = 2.0,
        kernel_size: int = 3,
        num_heads: int | None = None,
    ) -> None:
        super().__init__()
        check_odd(kernel_size)
        inner = hidden_width(dim, expansion)
        heads = math.gcd(HEADS, inner) if num_heads is None else num_heads
        check_divisor("num_heads", heads, inner)
        self.num_heads, self.is_reversed = heads, bool(slot and slot.block % 2)
        self.proj_up, self.proj_down = nn.Linear(dim, 2 * inner), nn.Linear(inner, dim)
        reach = kernel_size // 2
        self.conv = nn.Conv2d(inner, inner, kernel_size, padding=reach, groups=inner)
        self.q_proj, self.k_proj, self.v_proj = (
            BlockLinear(inner, math.gcd(QKV_BLOCK, inner)) for _ in range(3)
        )
        self.igate, self.fgate = nn.Linear(3 * inner, heads), nn.Linear(3 * inner, heads)
        self.cell, self.outnorm = MLSTMCell(), HeadNorm(inner)
        self.learnable_skip = nn.Parameter(torch.ones(inner))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Open the forget gates, by biases from 3 to 6, and leave the gates' weights at zero."""
        dim, heads = self.proj_up.in_features, self.num_heads
        small = math.sqrt(2 / (5 * dim))
        nn.init.normal_(self.proj_up.weight, std=small)
        nn.init.normal_(self.proj_down.weight, std=2 / math.sqrt(dim))
        for layer in (self.proj_up, self.proj_down):
            nn.init.zeros_(layer.bias)
        for proj in (self.q_proj, self.k_proj, self.v_proj):
            nn.init.normal_(proj.weight, std=small)
        for gate in (self.igate, self.fgate):
            nn.init.zeros_(gate.weight)
        nn.init.normal_(self.igate.bias, std=0.1)
        with torch.no_grad():
            self.fgate.bias.copy_(torch.linspace(3, 6, heads))

    def mix(self, x: Tensor) -> Tensor:
        """Run over the rows of a map: (B, H, W, C) -> (B, H, W, C)."""
        if self.is_reversed:
            x = x.flip((1, 2))
        size = (x.shape[1], x.shape[2])
        m, z = self.proj_up(x).chunk(2, dim=-1)
        u = F.silu(to_nhwc(self.conv(to_nchw(m))))
        q, k, v = self.q_proj(u), self.k_proj(u), self.v_proj(m)
        gates = torch.cat([q, k, v], dim=-1)
        precise = torch.promote_types(x.dtype, torch.float32)
        i, f = (gate(gates).to(precise).flatten(1, 2).mT for gate in (self.igate, self.fgate))
        q, k, v = (
            split_heads(part.flatten(1, 2).to(precise), self.num_heads) for part in (q, k, v)
        )
        read = self.cell(q, k * k.shape[-1] ** -0.5, v, i, F.logsigmoid(f)).to(x.dtype)
        y = self.outnorm(read).unflatten(1, size) + self.learnable_skip * u
        y = self.proj_down(y * F.silu(z))
        return y.flip((1, 2)) if self.is_reversed else y


class BlockLinear(nn.Module):
    """Block-diagonal linear layer with a bias, (..., E) -> (..., E).

    Args:
        dim: E.
        width: Channels of a block.
    """

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim // width, width, width))
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Map each block of channels."""
        blocks = x.unflatten(-1, self.weight.shape[:2])
        return torch.einsum("...nd,ned->...ne", blocks, self.weight).flatten(-2) + self.bias


class HeadNorm(nn.Module):
    """(1 + g) LN(x) + b with a layer norm per head: (B, h, N, d) -> (B, N, E).

    Args:
        dim: E.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.zeros(dim)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the channels of each head."""
        return (1 + self.weight) * merge_heads(F.layer_norm(x, x.shape[-1:])) + self.bias


class MLSTMCell(nn.Module):
    """``mlstm`` as a part, which hooks, profilers and pictures name."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, i: Tensor, log_forget: Tensor) -> Tensor:
        """Return h of all tokens: (B, h, N, d) -> (B, h, N, d)."""
        return mlstm(q, k, v, i, log_forget)


def mlstm(q: Tensor, k: Tensor, v: Tensor, i: Tensor, log_forget: Tensor) -> Tensor:
    """Return h_t = C_t q_t / max(|n_t^T q_t|, 1) for all tokens, in chunks.

    All exponents are relative to the greatest that a token sees, which cancels in the quotient.

    Args:
        q: (B, h, N, d).
        k: (B, h, N, d).
        v: (B, h, N, d).
        i: Logarithms of the input gates, (B, h, N).
        log_forget: Logarithms of the forget gates, (B, h, N).

    Returns:
        (B, h, N, d).
    """
    count = q.shape[2]
    length = min(CHUNK, count)
    total = log_forget.cumsum(-1)
    log_input = i - total  # token j counts e^(total_t + given_j) at token t
    most = running_maximum(log_input.detach())
    least = (-total - most).exp()  # 1, in the scale of the sums
    v = F.pad(v, (0, 1), value=1.0)  # n is the last column of C
    q, k, v, log_input, most = (
        cut(x, length) for x in (q, k, v, log_input, most)
    )  # (B, h, m, c, ...)
    ends = most[..., -1]
    updates = (share(log_input - ends.unsqueeze(-1)).unsqueeze(-1) * k).mT @ v
    memory = memories(ends, updates.flatten(3)).view_as(updates)
    within = share(log_input.unsqueeze(-2) - most.unsqueeze(-1)).tril() * (q @ k.mT)
    sums = within @ v + share(before(ends).unsqueeze(-1) - most).unsqueeze(-1) * (q @ memory)
    sums = sums.flatten(2, 3)[:, :, :count]
    return sums[..., :-1] / torch.maximum(sums[..., -1].abs(), least).unsqueeze(-1)


def running_maximum(x: Tensor) -> Tensor:
    """Return the greatest value up to each place of the last axis: (..., N) -> (..., N).

    ONNX lacks it. In an export each place sees 1, 2, 4, ... places before it in turn.
    """
    if not is_exporting():
        return x.cummax(-1).values
    reach = 1
    while reach < x.shape[-1]:
        x = torch.maximum(x, F.pad(x[..., :-reach], (reach, 0), value=-math.inf))
        reach *= 2
    return x


def memories(ends: Tensor, updates: Tensor) -> Tensor:
    """Return the memory that each chunk begins with, in the scale of the chunk before it.

    Memories of a group of chunks are sums of what the group's earlier chunks add, and of what the
    group begins with, which groups of groups give.

    Args:
        ends: Logarithms of the scales that chunks end with, never falling, (B, h, m).
        updates: What each chunk adds in the scale of its end, (B, h, m, D).

    Returns:
        (B, h, m, D).
    """
    count, starts = ends.shape[2], before(ends)
    length = min(CHUNK, count)
    ends, starts, updates = (cut(x, length) for x in (ends, starts, updates))
    earlier = share(ends.unsqueeze(-2) - starts.unsqueeze(-1)).tril(-1)
    memory = earlier @ updates  # (B, h, groups, chunks of a group, D)
    if count > length:
        last = ends[..., -1]
        additions = share(ends - last.unsqueeze(-1)).unsqueeze(-2) @ updates
        remainders = share(before(last).unsqueeze(-1) - starts).unsqueeze(-1)
        memory = memory + remainders * memories(last, additions.squeeze(3)).unsqueeze(3)
    return memory.flatten(2, 3)[:, :, :count]


def share(exponent: Tensor) -> Tensor:
    """Return e^x; exponents are above 0 for what is masked and for zeros after the last token."""
    return exponent.clamp(max=0).exp()


def before(ends: Tensor) -> Tensor:
    """Return the scale that each chunk begins with, the first with its own: (B, h, m) -> same."""
    return torch.cat([ends[..., :1], ends[..., :-1]], dim=-1)


def cut(x: Tensor, length: int) -> Tensor:
    """Cut the third axis into pieces, the last filled with zeros: (B, h, n, ...) -> 1 axis more."""
    lacking = -x.shape[2] % length
    if lacking:
        x = F.pad(x, (0, 0) * (x.ndim - 3) + (0, lacking))
    return x.unflatten(2, (-1, length))
