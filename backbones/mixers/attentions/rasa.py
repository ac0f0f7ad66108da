"""Recursive atrous self-attention, LVT's after its first stage.

    A(x) = W softmax(q k^T / sqrt d) v,  q = SiLU(D_1 q') + SiLU(D_3 q') + SiLU(D_5 q'),  q' = W_q x

D_s are one depthwise 3x3 convolution at three dilations; keys and values are those of a reduced
map. The attention is applied again to its own output.

Source: Yang et al., "Lite Vision Transformer with Enhanced Self-Attention", CVPR 2022,
https://arxiv.org/abs/2112.10809. The host LVT uses this class.

Axes: B images, H W map, C channels, n heads of d channels.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.axes import to_nchw, to_nhwc
from backbones.layers.bounds import check_range
from backbones.layers.graph_sizes import whole_window
from backbones.layers.heads import merge_heads, split_heads, usual_heads
from backbones.layers.init import init_linear
from backbones.mixer import Mixer
from backbones.registry import register_mixer
from backbones.slots import Slot

HEAD_DIM = 32
DILATIONS = (1, 3, 5)
REDUCTIONS = (8, 4, 2, 1)  # by stage; LVT uses it from the second one on


class RecursiveAtrousSelfAttention(Mixer):
    """Global attention with queries from several dilations, applied again to its own output.

    With attention A, out_1 = SiLU(A(x)) and acc_1 = x, every further step has
    acc_t = acc_{t-1} + out_{t-1} and out_t = SiLU(A(acc_t)), all with the same weights. A single
    step is A(x) itself, without SiLU.

    Args:
        dim: Channels C.
        reduction: Factor by which the map of keys and values is smaller.
        steps: Recursion count r.
        num_heads: n, a divisor of C; by default as many as leave each 32 channels or more.

    Shape: (B, H, W, C) -> (B, H, W, C).
    """

    def __init__(self, dim: int, reduction: int, steps: int, num_heads: int | None = None) -> None:
        super().__init__()
        self.num_heads, self.steps = usual_heads(dim, num_heads, HEAD_DIM), steps
        self.q = nn.Linear(dim, dim, bias=False)
        self.atrous = nn.Conv2d(dim, dim, 3, padding=1, groups=dim, bias=False)
        self.reduce, self.norm = None, None
        if reduction > 1:
            self.reduce = nn.Conv2d(dim, dim, reduction, reduction)
            self.norm = nn.LayerNorm(dim)
        self.kv = nn.Linear(dim, 2 * dim, bias=False)
        self.proj = nn.Linear(dim, dim)

    def mix(self, x: Tensor) -> Tensor:
        """Apply attention ``steps`` times: (B, H, W, C) -> (B, H, W, C)."""
        out = self.attend(x)
        if self.steps == 1:
            return out
        for _ in range(self.steps - 1):
            x = x + F.silu(out)
            out = self.attend(x)
        return F.silu(out)

    def attend(self, x: Tensor) -> Tensor:
        """Return A(x): (B, H, W, C) -> (B, H, W, C)."""
        size = x.shape[1:3]
        q = split_heads(self._queries(x).flatten(1, 2), self.num_heads)
        if self.reduce is not None and self.norm is not None:
            windows = whole_window(to_nchw(x), self.reduce.kernel_size)
            x = self.norm(to_nhwc(self.reduce(windows)))
        k, v = self.kv(x.flatten(1, 2)).chunk(2, dim=-1)
        k, v = split_heads(k, self.num_heads), split_heads(v, self.num_heads)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.proj(merge_heads(mixed)).unflatten(1, size)

    def _queries(self, x: Tensor) -> Tensor:
        """Sum a depthwise convolution's outputs at three dilations, each after SiLU."""
        q, weight = to_nchw(self.q(x)), self.atrous.weight
        rows, columns = (side // 2 for side in self.atrous.kernel_size)
        scales = [
            F.silu(F.conv2d(q, weight, None, 1, (d * rows, d * columns), d, len(weight)))
            for d in DILATIONS
        ]
        return to_nhwc(scales[0] + scales[1] + scales[2])


@register_mixer("rasa", kind="token", source="LVT (CVPR 2022)")
def rasa(
    dim: int,
    *,
    slot: Slot | None = None,
    reduction: int | None = None,
    steps: int = 2,
    num_heads: int | None = None,
) -> RecursiveAtrousSelfAttention:
    """Build LVT's recursive attention; class tokens are not mixed: the host pools its map.

    The reduction omits rows and columns that do not fill a window, as the authors' code; a map
    smaller than a window is padded to one.

    Args:
        dim: Channels C.
        slot: Place in the host; its stage sets the reduction.
        reduction: s, side of the windows that become one key; by default 8, 4, 2 or 1 by stage.
        steps: Recursion count r.
        num_heads: n, a divisor of C; by default as many as leave each 32 channels or more.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters: 4 C^2 + 10 C; with s > 1 also
    s^2 C^2 + 3 C.

    Raises:
        ValueError: A reduction or number of steps below 1.

    Source: LVT (CVPR 2022), https://arxiv.org/abs/2112.10809.
    """
    side = REDUCTIONS[min(slot.stage if slot else 0, 3)] if reduction is None else reduction
    check_range("reduction", side, 1)
    check_range("steps", steps, 1)
    mixer = RecursiveAtrousSelfAttention(dim, side, steps, num_heads)
    mixer.apply(init_linear)
    return mixer
