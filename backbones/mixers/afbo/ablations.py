"""AFBO's ablations of Table 5: channel mappings and spatial models alone, and in the other order.

Source: Wu et al., ICLR 2025, Sec. 4.4, Table 5. The options are those of ``afbo``.
"""

from __future__ import annotations

from backbones.base import hidden_width
from backbones.mixers.afbo.channel_mappings import (
    DenseMapping,
    GroupedCrossMapping,
    OverlappedCycleMapping,
    Pairing,
)
from backbones.mixers.afbo.scfbo import SCFBO, Act, ActOn, Init, Order
from backbones.mixers.afbo.spatial_models import SpatialName
from backbones.mixers.afbo.variants import HOST_GROUPS, HOST_OVERRIDES
from backbones.registry import register_mixer


@register_mixer(
    "afbo_c",
    kind="channel",
    source="AFBO (ICLR 2025), Table 5: AFBO-C; Table 13",
    options_on=HOST_GROUPS,
    host_overrides=HOST_OVERRIDES,
    published_on=("deit_t", "deit_s"),
)
def afbo_c(
    dim: int,
    *,
    hidden_ratio: float = 4.0,
    g1: int = 2,
    g2: int = 4,
    window: int | None = None,
    rounds: int = 2,
    pairing: Pairing = "anti",
    act: Act = "silu",
    act_on: ActOn = "a",
    init: Init = "ours",
    bias: bool = True,
    drop: float = 0.0,
) -> SCFBO:
    """AFBO with its channel mappings only: W3 (SiLU(OCCM(x)) * GCCM(x)) + b3."""
    hidden = hidden_width(dim, hidden_ratio)
    return SCFBO(
        OverlappedCycleMapping(dim, hidden, g2, window),
        GroupedCrossMapping(dim, hidden, g1, rounds, pairing),
        sm="none",
        act=act,
        act_on=act_on,
        init=init,
        bias=bias,
        drop=drop,
    )


@register_mixer(
    "afbo_s",
    kind="channel",
    source="AFBO (ICLR 2025), Table 5: AFBO-S",
    host_overrides=HOST_OVERRIDES,
    published_on=("deit_t",),
)
def afbo_s(
    dim: int,
    *,
    hidden_ratio: float = 4.0,
    sm: SpatialName = "dw",
    kernel_size: int = 3,
    order: Order = "cs",
    act: Act = "silu",
    act_on: ActOn = "a",
    init: Init = "ours",
    bias: bool = True,
    drop: float = 0.0,
) -> SCFBO:
    """AFBO with its spatial models only: z = W1 x + b1, then W3 (SiLU(DW_a(z)) * DW_b(z)) + b3."""
    return SCFBO(
        DenseMapping(dim, hidden_width(dim, hidden_ratio)),
        None,
        sm=sm,
        kernel_size=kernel_size,
        order=order,
        act=act,
        act_on=act_on,
        init=init,
        bias=bias,
        drop=drop,
    )


@register_mixer(
    "afbo_sc",
    kind="channel",
    source="AFBO (ICLR 2025), Table 5: AFBO-SC; Table 10 with sm=conv",
    options_on=HOST_GROUPS,
    host_overrides=HOST_OVERRIDES,
    published_on=("deit_t", "swin_t"),
)
def afbo_sc(
    dim: int,
    *,
    hidden_ratio: float = 4.0,
    g1: int = 2,
    g2: int = 4,
    window: int | None = None,
    rounds: int = 2,
    pairing: Pairing = "anti",
    sm: SpatialName = "dw",
    kernel_size: int = 3,
    act: Act = "silu",
    act_on: ActOn = "a",
    init: Init = "ours",
    bias: bool = True,
    drop: float = 0.0,
) -> SCFBO:
    """AFBO in the other order: W3 (SiLU(OCCM(DW_a(x))) * GCCM(DW_b(x))) + b3."""
    hidden = hidden_width(dim, hidden_ratio)
    return SCFBO(
        OverlappedCycleMapping(dim, hidden, g2, window),
        GroupedCrossMapping(dim, hidden, g1, rounds, pairing),
        sm=sm,
        kernel_size=kernel_size,
        order="sc",
        act=act,
        act_on=act_on,
        init=init,
        bias=bias,
        drop=drop,
    )
