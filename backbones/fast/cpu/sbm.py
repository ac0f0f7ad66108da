"""SBM as one operator without a gradient: SiLU(x W_G) * LN(SiLU(W_s p W_c) * V), Eq. 2.

``csrc/star.cpp`` takes an image through all steps while it is in the cache: on a map of 14 x 14
tokens torch's operations take as long to start as to compute.

Time of ``sbm_t`` with over without it, on an AMD EPYC with AVX-512: 0.76 (batch 1 and 8). Keeping
factors that were resampled to another map: 0.87 at 448 pixels, 0.89 at 256.

Axes: B images, H W map, n = H W tokens, C channels, m latent tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from backbones.fast.base import FastModule
from backbones.fast.eval_cache import EvalCache
from backbones.mixers.sbm.bilinear_mapping import BilinearMapping, Size
from backbones.mixers.sbm.mixer import StarBilinearMapping


class FastStarBilinearMapping(FastModule, StarBilinearMapping):
    """The whole of Eq. 2 with a 3x3 convolution, on CPUs where no gradient is recorded."""

    def serves(self, x: Tensor, prefix: Tensor | None = None) -> bool:
        """Return True for the options that the operator computes."""
        bilinear, conv = self.bilinear, self.conv
        return (
            not torch.is_grad_enabled()
            and prefix is None
            and x.is_contiguous()
            and x.shape[-1] == self.dim
            and bilinear is not None
            and bilinear.rank < x.shape[1] * x.shape[2]  # W_c on the latent tokens takes less
            and type(conv) is nn.Conv2d
            and conv.padding_mode == "zeros"
            and conv.kernel_size == (3, 3)
            and conv.bias is not None
            and self.in_proj.out_features == 2 * self.dim
            and type(self.pre_proj) is nn.Identity
            and all(type(layer) is nn.Linear for layer in layers(self)[:-1])
            and type(self.norm) is nn.LayerNorm
            and all(layer.bias is not None for layer in layers(self))
        )

    def compute(self, x: Tensor, prefix: None = None) -> Tensor:
        """Mix a map: (B, H, W, C) -> (B, H, W, C)."""
        return self.out_proj(torch.ops.mixerlab.star_mixer(x, *operands(self, x)))


def operands(mixer: Any, x: Tensor) -> tuple[Any, ...]:
    """Return the operator's arguments after x.

    These are weights and biases of ``layers``, kernel (2 C, 1, 3, 3) and bias (2 C,) of the
    convolution, the factors of W_s (m, H, W), and the norm's eps.
    """
    parts = layers(mixer)
    return (
        [layer.weight for layer in parts],
        [layer.bias for layer in parts],
        mixer.conv.weight,
        mixer.conv.bias,
        *kept_factors(mixer.bilinear, (x.shape[1], x.shape[2])),
        mixer.norm.eps,
    )


def kept_factors(mapping: BilinearMapping, size: Size) -> tuple[Tensor, Tensor]:
    """Return contiguous factors (m, H, W) of W_s; those of another map are kept in evaluation."""
    if size == mapping.grid:
        return mapping.space_read, mapping.space_write
    cache: EvalCache = mapping.__dict__.setdefault("kept", EvalCache())
    sources = (mapping.space_read, mapping.space_write)
    factors = cache.get(sources, size, lambda: torch.stack(mapping.factors(size)))
    return factors[0], factors[1]


def layers(mixer: Any) -> tuple[Any, ...]:
    """Return what has a weight and a bias, in the operator's order; the norm is the last."""
    proj = mixer.bilinear.proj
    return mixer.in_proj, proj, mixer.lin_proj, mixer.gate_proj, mixer.norm
