"""The registered variants of AFBO: one function, and the same with some options fixed.

Source: Wu et al., ICLR 2025, https://openreview.net/forum?id=MJyqwBVgMs, Sec. 3.3, Table 1, App.
A.5 and Table 14 (what maps the channels), Sec. 4.4 and Table 5 (ablations), Sec. 4.1 and App. A.1
(group numbers).
"""

from __future__ import annotations

from typing import Literal

from backbones.mixers.afbo.channel_mappings import (
    BlockDiagonalMapping,
    ChannelMapping,
    DenseMapping,
    GroupedCrossMapping,
    OverlappedCycleMapping,
    Pairing,
)
from backbones.mixers.afbo.scfbo import SCFBO, ActOn, Init, Order
from backbones.mixers.afbo.spatial_models import SpatialName
from backbones.options import variant_of
from backbones.registry import register_mixer
from backbones.slots import hidden_width

MappingName = Literal["dense", "block", "gccm", "occm"]

GROUPING = ("g1", "g2", "window", "rounds", "pairing")  # unused by dense mappings

# (G1, G2) is (2, 4) but on these; the package says why.
HOST_GROUPS = {
    pattern: {"g2": 3}
    for pattern in (
        *("deit_[sb]", "swin_*", "pvt_v2_*", "lvt_*"),
        *("mixer_*", "cyclemlp_*", "hiremlp_*"),
    )
}
# A class token is alone, without neighbours for a spatial model.
HOST_OVERRIDES = {"lvt_*": {"swap_class_ffn": False}}


@register_mixer(
    "afbo_cs",
    kind="channel",
    source="AFBO (ICLR 2025), Table 5: AFBO-CS, another name of AFBO",
    options_on=HOST_GROUPS,
    host_overrides=HOST_OVERRIDES,
    published_on=("deit_t",),
)
@register_mixer(
    "afbo",
    kind="channel",
    source="AFBO (ICLR 2025), Eq. 4 with Eq. 7 on the activated branch and Eq. 6 on the other",
    options_on=HOST_GROUPS,
    host_overrides=HOST_OVERRIDES,
    published_on=(
        "bert_base",
        "bert_large",
        "gpt1",
        "deit_*",
        "swin_*",
        "poolformer_*",
        "pvt_v2_b1",
        "gcvit_xxt",
        "gcvit_xt",
        "lvt_r2",
        "cyclemlp_b1",
        "hiremlp_t",
        "visionllama_*",
        "edgevit_xxs",
    ),
)
def afbo(
    dim: int,
    *,
    hidden_ratio: float = 4.0,
    cm_a: MappingName = "occm",
    cm_b: MappingName | Literal["shared"] = "gccm",
    g1: int = 2,
    g2: int = 4,
    window: int | None = None,
    rounds: int = 2,
    pairing: Pairing = "anti",
    sm: SpatialName = "dw",
    kernel_size: int = 3,
    order: Order = "cs",
    act: str = "silu",
    act_on: ActOn = "a",
    init: Init = "ours",
    bias: bool = True,
    drop: float = 0.0,
) -> SCFBO:
    """Build AFBO: W3 (SiLU(DW_a(OCCM(x))) * DW_b(GCCM(x))) + b3, or one of its ablations.

    Parameters: C h (1 / (rounds g1) + window / g2 + 1) + 2 h k^2 + 4 h + C, for widths that divide
    evenly.

    Args:
        dim: Channels C.
        hidden_ratio: M, hidden width over C.
        cm_a: Mapping of the activated branch: "dense", "block", "gccm" or "occm".
        cm_b: Mapping of the other branch, or "shared" for one mapping that both read.
        g1: Groups of GCCM and of a block-diagonal mapping.
        g2: Groups of OCCM.
        window: Groups that each output group of OCCM reads; g2 - 1 (at least 1) by default.
        rounds: Number of times that GCCM applies each weight, each time to another group.
        pairing: Which group GCCM reads in round s with weight w: "anti" (Eq. 6) reads G - 1 - w in
            the second round, "cyclic" reads (w + s) mod G.
        sm: Spatial model: "dw", "max", "avg", "sa", "conv" (order "sc" only) or "none".
        kernel_size: Side of the spatial models, odd.
        order: "cs" or "sc": channel mappings before or after the spatial models.
        act: Activation, such as "silu"; see ``layers.activations.create_activation``.
        act_on: "a", "b", "ab" or "post".
        init: "ours" or "timm".
        bias: Add a bias in mappings, convolutions and W3: 4 h + C parameters.
        drop: Dropout after the product and after W3.

    Source: AFBO (ICLR 2025), Eq. 4, https://openreview.net/forum?id=MJyqwBVgMs.
    """
    hidden = hidden_width(dim, hidden_ratio)

    def mapping(name: MappingName) -> ChannelMapping:
        if name == "occm":
            return OverlappedCycleMapping(dim, hidden, g2, window)
        if name == "gccm":
            return GroupedCrossMapping(dim, hidden, g1, rounds, pairing)
        if name == "block":
            return BlockDiagonalMapping(dim, hidden, g1)
        return DenseMapping(dim, hidden)

    return SCFBO(
        mapping(cm_a),
        None if cm_b == "shared" else mapping(cm_b),
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
    "scfbo_gc",
    kind="channel",
    source="AFBO (ICLR 2025), Sec. 3.3, Table 1: SCFBO-GC",
    host_overrides=HOST_OVERRIDES,
    published_on=("deit_t",),
)
@variant_of(afbo, fixed={"cm_a": "gccm", "cm_b": "gccm"}, without=("g2", "window"))
def scfbo_gc() -> None:
    """Build AFBO with GCCM on both branches, each with its own weights."""


@register_mixer(
    "scfbo_oc",
    kind="channel",
    source="AFBO (ICLR 2025), Sec. 3.3, Table 1: SCFBO-OC",
    options_on=HOST_GROUPS,
    host_overrides=HOST_OVERRIDES,
    published_on=("deit_t",),
)
@variant_of(afbo, fixed={"cm_a": "occm", "cm_b": "occm"}, without=("g1", "rounds", "pairing"))
def scfbo_oc() -> None:
    """Build AFBO with OCCM on both branches, each with its own weights."""


@register_mixer(
    "full",
    kind="channel",
    source="AFBO (ICLR 2025), Eq. 4 with dense mappings, App. A.5, Table 14: FULL",
    host_overrides=HOST_OVERRIDES,
    published_on=("deit_t", "swin_t"),
)
@variant_of(afbo, fixed={"cm_a": "dense", "cm_b": "dense"}, without=GROUPING)
def full() -> None:
    """Build AFBO with dense mappings: W3 (SiLU(DW_a(W1 x + b1)) * DW_b(W2 x + b2)) + b3."""


@register_mixer(
    "afbo_c",
    kind="channel",
    source="AFBO (ICLR 2025), Table 5: AFBO-C; Table 13",
    ignores_order=True,
    options_on=HOST_GROUPS,
    host_overrides=HOST_OVERRIDES,
    published_on=("deit_t", "deit_s"),
)
@variant_of(afbo, fixed={"sm": "none"}, without=("cm_a", "cm_b", "kernel_size", "order"))
def afbo_c() -> None:
    """Build AFBO with its channel mappings only: W3 (SiLU(OCCM(x)) * GCCM(x)) + b3."""


@register_mixer(
    "afbo_s",
    kind="channel",
    source="AFBO (ICLR 2025), Table 5: AFBO-S",
    host_overrides=HOST_OVERRIDES,
    published_on=("deit_t",),
)
@variant_of(afbo, fixed={"cm_a": "dense", "cm_b": "shared"}, without=GROUPING)
def afbo_s() -> None:
    """Build AFBO with one dense mapping z = W1 x + b1: W3 (SiLU(DW_a(z)) * DW_b(z)) + b3."""


@register_mixer(
    "afbo_sc",
    kind="channel",
    source="AFBO (ICLR 2025), Table 5: AFBO-SC; Table 10 with sm=conv",
    options_on=HOST_GROUPS,
    host_overrides=HOST_OVERRIDES,
    published_on=("deit_t", "swin_t"),
)
@variant_of(afbo, fixed={"order": "sc"}, without=("cm_a", "cm_b"))
def afbo_sc() -> None:
    """Build AFBO in the other order: W3 (SiLU(OCCM(DW_a(x))) * GCCM(DW_b(x))) + b3."""
