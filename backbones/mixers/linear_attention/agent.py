"""Agent attention: a few agents, pooled from the queries, attend to all tokens, and tokens to them.

    y = W (softmax(q a^T / sqrt d + B_2) softmax(a k^T / sqrt d + B_1) v + D v),  a = pool(q)

B_1 and B_2 are sums of a small table, interpolated to the map, and of tables of rows and columns.
D is a depthwise 3x3 convolution.

Source: Han et al., "Agent Attention: On the Integration of Softmax and Linear Attention", ECCV
2024, https://arxiv.org/abs/2312.08874. 9, 16, 49 and 49 agents by stage, tables of 7x7, 64 channels
per head and truncated normal values of 0.02 are those of the authors' code for PVT.

Axes: B images, H W map, N tokens, C channels, h heads of d channels, n agents.
"""

from __future__ import annotations

import math
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.axes import to_nchw, to_nhwc
from backbones.layers.graph_sizes import adaptive_avg_pool
from backbones.layers.heads import merge_heads, split_heads, usual_heads
from backbones.layers.init import init_linear
from backbones.mixer import Mixer
from backbones.registry import register_mixer
from backbones.slots import Slot

HEAD_DIM = 64
AGENTS = (9, 16, 49, 49)  # by stage
TABLE = 7


@register_mixer("agent", kind="token", source="Agent Attention (ECCV 2024)")
class AgentAttention(Mixer):
    """W (softmax(q a^T / sqrt d + B_2) softmax(a k^T / sqrt d + B_1) v + D v) with agents a.

    Tables of rows and columns belong to the map size that the host was built for and are
    interpolated for others. Class tokens are not mixed: the host pools its map. A host of one stage
    counts as the first; for its 14 x 14 tokens type ``agents=49``.

    Args:
        dim: Channels C.
        grid: Map size (H, W), for the tables.
        slot: Place in the host; its stage sets the number of agents.
        num_heads: h, a divisor of C; by default as many as leave each 64 channels or more.
        agents: n, a square number; by default 9, 16, 49 or 49 by stage.
        qkv_bias: Add a bias in the projections of queries, keys and values.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters: 4 C^2 + 14 C + 2 h n (49 + H +
    W).

    Raises:
        ValueError: n is not a square number, or ``num_heads`` does not divide C.

    Source: Agent Attention (ECCV 2024), https://arxiv.org/abs/2312.08874.
    """

    grid_axes = MappingProxyType(
        {
            "ah_bias": "1 heads agents H 1",
            "aw_bias": "1 heads agents 1 W",
            "ha_bias": "1 heads H 1 agents",
            "wa_bias": "1 heads 1 W agents",
        }
    )
    shows_attention = False
    no_weight_decay = ("an_bias", "na_bias", "ah_bias", "aw_bias", "ha_bias", "wa_bias")

    def __init__(
        self,
        dim: int,
        *,
        grid: tuple[int, int],
        slot: Slot | None = None,
        num_heads: int | None = None,
        agents: int | None = None,
        qkv_bias: bool = True,
    ) -> None:
        super().__init__()
        count = AGENTS[min(slot.stage if slot else 0, 3)] if agents is None else agents
        self.side = math.isqrt(max(count, 0))
        if count < 1 or self.side**2 != count:
            raise ValueError(f"agents must be a square number such as 49, got {count}")
        heads, (height, width) = usual_heads(dim, num_heads, HEAD_DIM), grid
        self.num_heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        self.dwc = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)
        self.an_bias, self.na_bias = (_table(heads, count, TABLE, TABLE) for _ in range(2))
        self.ah_bias = _table(1, heads, count, height, 1)
        self.aw_bias = _table(1, heads, count, 1, width)
        self.ha_bias = _table(1, heads, height, 1, count)
        self.wa_bias = _table(1, heads, 1, width, count)
        self.apply(init_linear)

    def mix(self, x: Tensor) -> Tensor:
        """Attend through the agents: (B, H, W, C) -> (B, H, W, C)."""
        size = (x.shape[1], x.shape[2])
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        local = to_nhwc(self.dwc(to_nchw(v)))
        agents = to_nhwc(adaptive_avg_pool(to_nchw(q), (self.side, self.side)))
        q, k, v, agents = (
            split_heads(part.flatten(1, 2), self.num_heads) for part in (q, k, v, agents)
        )
        to_agents, to_tokens = self._biases(size)
        gathered = F.scaled_dot_product_attention(agents, k, v, attn_mask=to_agents)
        mixed = F.scaled_dot_product_attention(q, agents, gathered, attn_mask=to_tokens)
        return self.proj(merge_heads(mixed).unflatten(1, size) + local)

    def _biases(self, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return B_1 (1, h, n, N) and B_2 (1, h, N, n)."""
        small = (
            F.interpolate(table, size, mode="bilinear").flatten(2)
            for table in (self.an_bias, self.na_bias)
        )
        first, second = small
        to_agents = self.at_size("ah_bias", size) + self.at_size("aw_bias", size)
        to_tokens = self.at_size("ha_bias", size) + self.at_size("wa_bias", size)
        return first[None] + to_agents.flatten(3), second.mT[None] + to_tokens.flatten(2, 3)


def _table(*shape: int) -> nn.Parameter:
    return nn.Parameter(nn.init.trunc_normal_(torch.empty(shape), std=0.02))
