"""PosMLP's gating units, and gMLP's, as token mixers: sgu, lrpe_m, lrpe, glrpe, ggqpe.

    h = GELU(W1 x + b1),  u, v = halves of h,  y = W2 ((M u + b) * v) + b2

with M over the tokens of a window (``layers.token_relations`` has its kinds). The unit mixes tokens
and channels in one branch; in a host with feed-forward networks it takes the token slot and the
host's FFN stays.

Source: Wang et al., PosMLP, MM 2022, Eq. 9 to 15, Fig. 1 to 3; Liu et al., gMLP, NeurIPS 2021. What
the paper leaves open:

* Class tokens have no place in a window, so hosts with one are refused.
* LRPE has a LayerNorm before M in Eq. 10 and 11 and none in the authors' released code, which is
  followed; ``norm=True`` adds it.
* Windows are shifted in every second block where the host is built for dense prediction (Sec. 5.5).
"""

from __future__ import annotations

from collections.abc import Sequence

from backbones.base import Slot
from backbones.mixers.posmlp.gated_mlp import GatedMLP, Structure
from backbones.mixers.posmlp.relations import (
    Init,
    LookupRelation,
    QuadraticRelation,
    Sigma,
    TokenFC,
)
from backbones.registry import register_mixer

PerStage = int | Sequence[int]
WHOLE_MODELS = ("posmlp_*", "gmlp_*")
REPORTED = ("posmlp_t", "gmlp_s")
WINDOWS = (14, 14, 14, 7)  # Table 11, per stage
GROUPS = (8, 16, 32, 64)


@register_mixer(
    "sgu",
    kind="token",
    source="gMLP (NeurIPS 2021), Sec. 2.1; PosMLP (MM 2022), Eq. 1",
    options_on={"posmlp_*": {"init": "posmlp"}},
    named_on=("posmlp_*",),  # gMLP has it already
    published_on=("posmlp_t",),
)
def sgu(
    dim: int,
    *,
    hidden_ratio: float = 4.0,
    window: PerStage = WINDOWS,
    shift: bool | None = None,
    structure: Structure = "gate",
    norm: bool = True,
    bias: bool = True,
    init: Init = "gmlp",
    drop: float = 0.0,
    slot: Slot | None = None,
) -> GatedMLP:
    """M is free: N^2 + N parameters per block of N-token windows.

    Args:
        dim: Channels C.
        hidden_ratio: gamma, hidden width over C.
        window: Side of the windows, one for all stages or one each.
        shift: Whether every second block shifts its windows; None: where the host is dense.
        structure: "gate", "add", "concat" or "nonsplit" (Fig. 3).
        norm: LayerNorm on what is mixed.
        bias: Whether b is added.
        init: "gmlp" (M = 0, b = 1) or "posmlp" (M of 0.02, b = 0).
        drop: Dropout after the last linear layer.
        slot: Where it goes.
    """
    relation = TokenFC(_of_stage("window", window, slot), bias=bias, init=init)
    shifted = _shifted(shift, slot)
    return GatedMLP(
        dim, hidden_ratio, relation, structure=structure, norm=norm, shifted=shifted, drop=drop
    )


@register_mixer(
    "lrpe_m",
    kind="token",
    source="PosMLP (MM 2022), Eq. 10",
    named_on=WHOLE_MODELS,
    published_on=REPORTED,
)
def lrpe_m(
    dim: int,
    *,
    hidden_ratio: float = 4.0,
    window: PerStage = WINDOWS,
    shift: bool | None = None,
    groups: PerStage = 1,
    structure: Structure = "gate",
    norm: bool = False,
    bias: bool = True,
    drop: float = 0.0,
    cache: bool = True,
    slot: Slot | None = None,
) -> GatedMLP:
    """M is free plus a weight per offset: N^2 + (2w - 1)^2 + N parameters. Options as ``glrpe``."""
    relation = LookupRelation(
        _of_stage("window", window, slot), _of_stage("groups", groups, slot),
        bias=bias, free=True, cache=cache,
    )  # fmt: skip
    shifted = _shifted(shift, slot)
    return GatedMLP(
        dim, hidden_ratio, relation, structure=structure, norm=norm, shifted=shifted, drop=drop
    )


@register_mixer(
    "lrpe",
    kind="token",
    source="PosMLP (MM 2022), Eq. 11",
    named_on=WHOLE_MODELS,
    published_on=REPORTED,
)
def lrpe(
    dim: int,
    *,
    hidden_ratio: float = 4.0,
    window: PerStage = WINDOWS,
    shift: bool | None = None,
    structure: Structure = "gate",
    norm: bool = False,
    bias: bool = True,
    drop: float = 0.0,
    cache: bool = True,
    slot: Slot | None = None,
) -> GatedMLP:
    """M has a weight per offset: (2w - 1)^2 + N parameters. It is ``glrpe`` with one group."""
    return glrpe(
        dim, hidden_ratio=hidden_ratio, window=window, shift=shift, groups=1, structure=structure,
        norm=norm, bias=bias, drop=drop, cache=cache, slot=slot,
    )  # fmt: skip


@register_mixer(
    "glrpe",
    kind="token",
    source="PosMLP (MM 2022), Sec. 4.1, end; Table 1",
    named_on=WHOLE_MODELS,
    published_on=REPORTED,
)
def glrpe(
    dim: int,
    *,
    hidden_ratio: float = 4.0,
    window: PerStage = WINDOWS,
    shift: bool | None = None,
    groups: PerStage = GROUPS,
    structure: Structure = "gate",
    norm: bool = False,
    bias: bool = True,
    drop: float = 0.0,
    cache: bool = True,
    slot: Slot | None = None,
) -> GatedMLP:
    """M has a weight per offset and group: s (2w - 1)^2 + N parameters (App. 4 prints 3 s more).

    Args:
        dim: Channels C.
        hidden_ratio: gamma, hidden width over C.
        window: Side of the windows, one for all stages or one each.
        shift: Whether every second block shifts its windows; None: where the host is dense.
        groups: s, one for all stages or one each.
        structure: "gate", "add", "concat" or "nonsplit" (Fig. 3).
        norm: LayerNorm on what is mixed.
        bias: Whether b is added.
        drop: Dropout after the last linear layer.
        cache: Whether evaluation remembers M.
        slot: Where it goes.
    """
    relation = LookupRelation(
        _of_stage("window", window, slot), _of_stage("groups", groups, slot), bias=bias, cache=cache
    )
    shifted = _shifted(shift, slot)
    return GatedMLP(
        dim, hidden_ratio, relation, structure=structure, norm=norm, shifted=shifted, drop=drop
    )


@register_mixer(
    "ggqpe",
    kind="token",
    source="PosMLP (MM 2022), Eq. 12 to 15",
    named_on=("gmlp_*",),  # PosMLP has it already
    published_on=("gmlp_s",),
)
def ggqpe(
    dim: int,
    *,
    hidden_ratio: float = 4.0,
    window: PerStage = WINDOWS,
    shift: bool | None = None,
    groups: PerStage = GROUPS,
    sigma: Sigma = "gamma_gammaT",
    freeze_delta: bool = False,
    structure: Structure = "gate",
    norm: bool = False,
    bias: bool = True,
    drop: float = 0.0,
    cache: bool = True,
    slot: Slot | None = None,
) -> GatedMLP:
    """M is a Gaussian of the offset per group, normalised over the window: 6 s + N parameters.

    With ``groups=1`` it is GQPE. Further options as ``glrpe``.

    Args:
        dim: Channels C.
        hidden_ratio: gamma, hidden width over C.
        window: Side of the windows, one for all stages or one each.
        shift: Whether every second block shifts its windows; None: where the host is dense.
        groups: s, one for all stages or one each (Table 4).
        sigma: "gamma_gammaT", "gamma", "alpha" or "alpha_as_released" (Table 6).
        freeze_delta: Gaussians sit on the token itself (Table 6).
        structure: "gate", "add", "concat" or "nonsplit" (Fig. 3).
        norm: LayerNorm on what is mixed (Fig. 3d).
        bias: Whether b is added (Table 7).
        drop: Dropout after the last linear layer.
        cache: Whether evaluation remembers M.
        slot: Where it goes.
    """
    relation = QuadraticRelation(
        _of_stage("window", window, slot), _of_stage("groups", groups, slot),
        sigma=sigma, freeze_delta=freeze_delta, bias=bias, cache=cache,
    )  # fmt: skip
    shifted = _shifted(shift, slot)
    return GatedMLP(
        dim, hidden_ratio, relation, structure=structure, norm=norm, shifted=shifted, drop=drop
    )


def _shifted(shift: bool | None, slot: Slot | None) -> bool:
    """Every second block, where asked for or else in dense prediction."""
    return slot is not None and bool(slot.block % 2) and (slot.dense if shift is None else shift)


def _of_stage(option: str, values: PerStage, slot: Slot | None) -> int:
    """The value of a stage out of one for all or one each; later stages take the last."""
    if isinstance(values, int):
        return values
    if not values:
        raise ValueError(f"{option} must be a whole number or one per stage, got none")
    return values[min(slot.stage if slot else 0, len(values) - 1)]
