"""RepMixer: a depthwise convolution in branches, which folds into a single one for inference.

    y = g (BN(D x) + BN(p x) + BN(x) - BN(x)),  y + x = D' x + b after folding

D is a depthwise k x k convolution, p a factor per channel; each BN has its own tensors. The host's
shortcut is the paper's + x, and a norm of the host before the mixer stays there.

Source: Vasu et al., "FastViT: A Fast Hybrid Vision Transformer using Structural
Reparameterization", ICCV 2023, https://arxiv.org/abs/2303.14189; branches and the layer scale g as
in the authors' code.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from backbones.layers.axes import to_nchw, to_nhwc
from backbones.layers.bounds import check_range
from backbones.layers.norms import scale_and_shift
from backbones.layers.reparam import BranchedConv, Fusible
from backbones.mixer import Mixer
from backbones.options import check_odd
from backbones.registry import register_mixer


@register_mixer("rep_mixer", kind="token", source="FastViT (ICCV 2023)")
class RepMixer(Mixer):
    """g (M(x) - BN(x)) with the branches M; class tokens are not mixed: the host pools its map.

    ``layers.reparam.fuse`` folds it into one depthwise convolution.

    Args:
        dim: Channels C.
        kernel_size: k, side of the convolution, odd and at least 3.
        layer_scale: Value that g, one factor per channel, starts from.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters: (k^2 + 10) C.

    Raises:
        ValueError: A kernel that is even or below 3.

    Source: FastViT (ICCV 2023), https://arxiv.org/abs/2303.14189.
    """

    def __init__(self, dim: int, *, kernel_size: int = 3, layer_scale: float = 1e-5) -> None:
        super().__init__()
        check_odd(kernel_size)
        check_range("kernel_size", kernel_size, 3)
        self.conv: nn.Module = RepMixerConv(dim, kernel_size, layer_scale)

    def mix(self, x: Tensor) -> Tensor:
        """Return g (M(x) - BN(x)): (B, H, W, C) -> (B, H, W, C)."""
        return to_nhwc(self.conv(to_nchw(x)))


class RepMixerConv(Fusible):
    """The mixer on (B, C, H, W), which equals one depthwise convolution in evaluation."""

    def __init__(self, dim: int, kernel_size: int, layer_scale: float) -> None:
        super().__init__()
        self.mixer = BranchedConv(dim, dim, [(kernel_size, kernel_size), (1, 1)])
        self.identity, self.norm = nn.BatchNorm2d(dim), nn.BatchNorm2d(dim)
        self.gamma = nn.Parameter(torch.full((dim, 1, 1), float(layer_scale)))

    def forward(self, x: Tensor) -> Tensor:
        """Return g (M(x) - BN(x)): (B, C, H, W) -> (B, C, H, W)."""
        return self.gamma * (self.mixer(x) + self.identity(x) - self.norm(x))

    @torch.no_grad()
    def fuse(self) -> nn.Conv2d:
        """Return the convolution g (M - N), with batch norms in its centre."""
        conv = self.mixer.fuse()
        (scale, shift), (less, down) = (
            scale_and_shift(norm, norm.weight) for norm in (self.identity, self.norm)
        )
        centre = conv.kernel_size[0] // 2
        conv.weight[:, 0, centre, centre] += scale - less
        conv.weight.mul_(self.gamma[..., None])
        if conv.bias is not None:
            conv.bias.add_(shift - down).mul_(self.gamma.flatten())
        return conv
