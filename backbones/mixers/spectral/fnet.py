"""Fourier mixing without parameters: the real part of a transform over tokens and channels.

    y = Re(FFT_tokens(FFT_channels(x)))

Source: Lee-Thorp et al., "FNet: Mixing Tokens with Fourier Transforms", NAACL 2022,
https://arxiv.org/abs/2105.03824, Eq. 3. The transform is unscaled, so y grows with the square root
of the number of tokens and channels; the paper's block ends with a layer norm.

Axes: N = H W tokens in row-major order, C channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backbones.mixer import Mixer
from backbones.registry import register_mixer


@register_mixer("fnet", kind="token", source="FNet (NAACL 2022), Eq. 3")
class FourierMixing(Mixer):
    """Re(FFT2(x)) of the matrix of N tokens and C channels, at any map size.

    Class tokens are not mixed: the host pools its map. Fast transforms cost N C log(N C).

    Args:
        dim: Channels C.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters: 0.

    Source: FNet (NAACL 2022), Eq. 3, https://arxiv.org/abs/2105.03824.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()

    def mix(self, x: Tensor) -> Tensor:
        """Return Re(FFT2(x)): (B, H, W, C) -> (B, H, W, C)."""
        precise = torch.promote_types(x.dtype, torch.float32)
        mixed = torch.fft.fft2(x.flatten(1, 2).to(precise), dim=(1, 2)).real
        return mixed.to(x.dtype).view(x.shape)
