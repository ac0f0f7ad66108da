"""SBM as one compiled operator where no gradient is recorded; see ``backbones/kernels``."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch import Tensor, nn

from backbones import kernels
from backbones.kernels.star_mixer import star_mixer
from backbones.mixers.sbm.bilinear_mapping import BilinearMapping

if TYPE_CHECKING:
    from backbones.mixers.sbm.mixer import StarBilinearMapping


def serves(mixer: StarBilinearMapping, x: Tensor) -> bool:
    """Whether the operator computes a mixer that ``is_usual``."""
    return (
        kernels.serves(x)
        and mixer.conv.kernel_size == (3, 3)
        and mixer.conv.bias is not None
        and all(layer.bias is not None for layer in _layers(mixer))
    )


def mix(mixer: StarBilinearMapping, x: Tensor, prefix: Tensor | None) -> Tensor:
    """Eq. 2 and the projection behind it: (B, h, w, C) -> (B, h, w, C)."""
    layers, conv = _layers(mixer), mixer.conv
    y = star_mixer(
        x,
        [layer.weight for layer in layers],
        [layer.bias for layer in layers],
        conv.weight,
        cast("Tensor", conv.bias),
        cast("BilinearMapping", mixer.bilinear).factors((x.shape[1], x.shape[2])),
        cast("nn.LayerNorm", mixer.norm).eps,
    )
    return cast("Tensor", mixer.out_proj(y))


def _layers(mixer: StarBilinearMapping) -> tuple[nn.Linear, ...]:
    """What has a weight and a bias, in the operator's order; the norm is the last."""
    found = (
        mixer.in_proj,
        cast("BilinearMapping", mixer.bilinear).proj,
        mixer.lin_proj,
        mixer.gate_proj,
        mixer.norm,
    )
    return cast("tuple[nn.Linear, ...]", found)
