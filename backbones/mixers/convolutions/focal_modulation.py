"""Focal modulation: a query times a gated sum of contexts from growing neighbourhoods.

    z_l = GELU(D_l z_{l-1}),  z_{L+1} = GELU(mean z_L)
    y = W (q(x) * h(sum_l g_l(x) z_l))

z_0, q and the gates g are linear in x; gates have one channel per level. D_l is a depthwise
convolution, whose kernel grows with the level; the mean is over the map.

Source: Yang et al., "Focal Modulation Networks", NeurIPS 2022, https://arxiv.org/abs/2203.11926.
Two levels with kernels of 3 and 5, GELU and the initialisation are those of the authors' FocalNet-T
(SRF).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.axes import to_nchw, to_nhwc
from backbones.layers.bounds import check_range
from backbones.layers.init import init_linear
from backbones.mixer import Mixer
from backbones.options import check_odd
from backbones.registry import register_mixer


@register_mixer("focal_modulation", kind="token", source="FocalNet (NeurIPS 2022)")
class FocalModulation(Mixer):
    """W (q(x) * h(sum_l g_l(x) z_l)); class tokens are not mixed: the host pools its map.

    Args:
        dim: Channels C.
        levels: L, contexts beside the global one, at least 1.
        kernel_size: k, side of the first kernel, odd; each next one is larger by 2.
        normalise: Divide the sum of contexts by L + 1.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters with L = 2, k = 3: 4 C^2 + 41 C +
    3.

    Source: FocalNet (NeurIPS 2022), https://arxiv.org/abs/2203.11926.
    """

    def __init__(
        self, dim: int, *, levels: int = 2, kernel_size: int = 3, normalise: bool = False
    ) -> None:
        super().__init__()
        check_odd(kernel_size)
        check_range("levels", levels, 1)
        self.widths, self.normalise = (dim, dim, levels + 1), normalise
        self.f = nn.Linear(dim, sum(self.widths))
        self.h = nn.Linear(dim, dim)
        self.proj = nn.Linear(dim, dim)
        sides = [kernel_size + 2 * level for level in range(levels)]
        self.focal_layers = nn.ModuleList(
            nn.Conv2d(dim, dim, side, padding=side // 2, groups=dim, bias=False) for side in sides
        )
        init_linear(self.f)
        init_linear(self.proj)  # h keeps torch's initialisation, as a convolution of the authors

    def mix(self, x: Tensor) -> Tensor:
        """Return W (q(x) * h(sum_l g_l(x) z_l)): (B, H, W, C) -> (B, H, W, C)."""
        query, context, gates = self.f(x).split(self.widths, dim=-1)
        context, total = to_nchw(context), 0.0
        for level, conv in enumerate(self.focal_layers):
            context = F.gelu(conv(context))
            total = total + gates[..., level : level + 1] * to_nhwc(context)
        global_context = F.gelu(to_nhwc(context.mean((2, 3), keepdim=True)))
        total = total + gates[..., -1:] * global_context
        if self.normalise:
            total = total / gates.shape[-1]
        return self.proj(query * self.h(total))
