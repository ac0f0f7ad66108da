"""The two halves of IFFN, each by itself: Table 2."""

from __future__ import annotations

from backbones.mixers.iffn.depthwise import Order
from backbones.mixers.iffn.mixer import IFFN, NO_CLASS_TOKEN, ArbName, Init
from backbones.registry import register_mixer


@register_mixer(
    "affn",
    kind="channel",
    source="IFFN (ICML 2024), Eq. 5; Table 2, row 'w/ channel'",
    host_overrides=NO_CLASS_TOKEN,
    published_on=("deit_t",),
)
def affn(
    dim: int,
    *,
    hidden_ratio: float = 4.0,
    n_branches: int = 2,
    act: str = "gelu",
    arb: ArbName | bool = "on",
    init: Init = "ones",
    drop: float = 0.0,
    bn_mid: bool = True,
    bn_out: bool = True,
) -> IFFN:
    """IFFN without its depthwise block, each token by itself."""
    return IFFN(
        dim, hidden_ratio=hidden_ratio, spatial=False, n_branches=n_branches, act=act, arb=arb,
        init=init, drop=drop, bn_mid=bn_mid, bn_out=bn_out,
    )  # fmt: skip


@register_mixer(
    "iffn_spatial",
    kind="channel",
    source="IFFN (ICML 2024), Sec. 4.3; Table 2, row 'w/ spatial'",
    host_overrides=NO_CLASS_TOKEN,
    published_on=("deit_t",),
)
def iffn_spatial(
    dim: int,
    *,
    hidden_ratio: float = 4.0,
    act: str = "gelu",
    kernel_size: int = 3,
    dw_residual: bool = False,
    dw_order: Order = "bn_act",
    drop: float = 0.0,
    bn_mid: bool = False,
    bn_out: bool = False,
    grid: tuple[int, int] | None = None,
) -> IFFN:
    """An FFN of full width with IFFN's depthwise block after its activation."""
    return IFFN(
        dim, hidden_ratio=hidden_ratio, channel=False, act=act, kernel_size=kernel_size,
        dw_residual=dw_residual, dw_order=dw_order, drop=drop, bn_mid=bn_mid, bn_out=bn_out,
        grid=grid,
    )  # fmt: skip
