"""Convolutional self-attention, LVT's in its first stage: one value matrix per place of a window.

    y = W sum over windows of softmax(W_A m / sqrt d) [V_1 x_1, ..., V_9 x_9]

m is the mean of four tokens of a 3x3 window, from which its 9 x 9 coefficients are read.

Source: Yang et al., "Lite Vision Transformer with Enhanced Self-Attention", CVPR 2022,
https://arxiv.org/abs/2112.10809. The host LVT uses this class.

Axes: B images, H W map, C channels, n heads of d channels, h w windows, K = 9 places in a window.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from backbones.layers.heads import usual_heads
from backbones.layers.init import init_linear
from backbones.layers.overlapping_windows import attend, gather, window_means
from backbones.mixer import Mixer
from backbones.registry import register_mixer

HEAD_DIM = 32
SIDE, STRIDE = 3, 2  # of the windows


class ConvolutionalSelfAttention(Mixer):
    """Attention within overlapping 3x3 windows, with coefficients from the window's mean.

    Each of the nine places of a window has its own value matrix and its own output. Outputs are
    added where windows overlap.

    Args:
        dim: Channels C.
        num_heads: n, a divisor of C; by default as many as leave each 32 channels or more.

    Shape: (B, H, W, C) -> (B, H, W, C).
    """

    def __init__(self, dim: int, num_heads: int | None = None) -> None:
        super().__init__()
        self.num_heads = usual_heads(dim, num_heads, HEAD_DIM)
        self.coefficients = nn.Linear(dim, self.num_heads * SIDE**4)
        # Rows k C to (k + 1) C are the value matrix of place k.
        window_dim = SIDE**2 * dim
        self.values = nn.Conv2d(window_dim, window_dim, 1, groups=SIDE**2, bias=False)
        self.proj = nn.Linear(dim, dim)

    def mix(self, x: Tensor) -> Tensor:
        """Add nine outputs per window where windows overlap: (B, H, W, C) -> (B, H, W, C)."""
        dim = x.shape[-1]
        windows = gather(x, SIDE, STRIDE)
        matrices = self.values.weight.view(len(windows), dim, dim).transpose(1, 2)
        values = torch.bmm(windows.flatten(1, 3), matrices).view(windows.shape)
        size = (x.shape[1], x.shape[2])
        return self.proj(attend(self._coefficients(x), values, size, STRIDE))

    def _coefficients(self, x: Tensor) -> Tensor:
        """Return coefficients from the windows' means: (B, H, W, C) -> (B, h, w, n, K, K)."""
        logits = self.coefficients(window_means(x, STRIDE))
        logits = logits.unflatten(-1, (self.num_heads, SIDE**2, SIDE**2))
        scale = (x.shape[-1] // self.num_heads) ** -0.5
        return (logits * scale).softmax(dim=-1)


@register_mixer("csa", kind="token", source="LVT (CVPR 2022)")
def csa(dim: int, *, num_heads: int | None = None) -> ConvolutionalSelfAttention:
    """Build LVT's convolutional self-attention; class tokens are not mixed: the host pools its map.

    Args:
        dim: Channels C.
        num_heads: n, a divisor of C; by default as many as leave each 32 channels or more.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters: 10 C^2 + 81 n (C + 1) + C.

    Source: LVT (CVPR 2022), https://arxiv.org/abs/2112.10809.
    """
    mixer = ConvolutionalSelfAttention(dim, num_heads)
    mixer.apply(init_linear)
    return mixer
