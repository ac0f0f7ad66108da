"""The two halves of IFFN, each by itself: Table 2."""

from __future__ import annotations

from typing import Any

from backbones.mixers.iffn.mixer import IFFN, NO_CLASS_TOKEN
from backbones.registry import register_mixer


@register_mixer(
    "affn",
    kind="channel",
    source="IFFN (ICML 2024), Eq. 5; Table 2, row 'w/ channel'",
    host_defaults=NO_CLASS_TOKEN,
    published_on=("deit_t",),
)
def affn(
    dim: int,
    *,
    hidden_ratio: float = 4.0,
    n_branches: int = 2,
    act: str = "gelu",
    arb: str | bool = "on",
    init: str = "ones",
    drop: float = 0.0,
    bn_mid: bool = True,
    bn_out: bool = True,
) -> IFFN:
    """IFFN without its depthwise block, each token by itself."""
    options: dict[str, Any] = {k: v for k, v in locals().items() if k != "dim"}
    return IFFN(dim, spatial=False, **options)


@register_mixer(
    "iffn_spatial",
    kind="channel",
    source="IFFN (ICML 2024), Sec. 4.3; Table 2, row 'w/ spatial'",
    host_defaults=NO_CLASS_TOKEN,
    published_on=("deit_t",),
)
def iffn_spatial(
    dim: int,
    *,
    hidden_ratio: float = 4.0,
    act: str = "gelu",
    kernel_size: int = 3,
    dw_residual: bool = False,
    dw_order: str = "bn_act",
    drop: float = 0.0,
    bn_mid: bool = False,
    bn_out: bool = False,
    grid: tuple[int, int] | None = None,
) -> IFFN:
    """An FFN of full width with IFFN's depthwise block after its activation."""
    options: dict[str, Any] = {k: v for k, v in locals().items() if k != "dim"}
    return IFFN(dim, channel=False, **options)
