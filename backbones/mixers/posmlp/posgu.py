"""PosMLP's gating units, and gMLP's, as token mixers: sgu, lrpe_m, lrpe, glrpe, ggqpe.

    h = GELU(W1 x + b1),  u, v = halves of h,  y = W2 ((M u + b) * v) + b2

with M over the tokens of a window (``relations`` has its kinds). The unit mixes tokens
and channels in one branch; in a host with feed-forward networks it takes the token slot and the
host's FFN stays.

Source: Wang et al., PosMLP, MM 2022, https://doi.org/10.1145/3503161.3547953, Eq. 9 to 15, Fig. 1
to 3; Liu et al., gMLP, NeurIPS 2021, https://arxiv.org/abs/2105.08050. What the paper leaves open:

* Windows hold tokens of the map only, so hosts with a class token are refused.
* LRPE has a LayerNorm before M in Eq. 10 and 11 and none in the authors' released code, which is
  followed; ``norm=True`` adds it.
* Windows are shifted in every second block where the host is built for dense prediction (Sec. 5.5).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from backbones.mixers.posmlp.gated_mlp import GatedMLP, Structure
from backbones.mixers.posmlp.relations import (
    Init,
    LookupRelation,
    QuadraticRelation,
    Sigma,
    TokenFC,
    TokenRelation,
)
from backbones.options import variant_of
from backbones.registry import register_mixer
from backbones.slots import Slot

PerStage = int | Sequence[int]
RelationName = Literal["free", "offset", "offset_and_free", "gaussian"]
WHOLE_MODELS = ("posmlp_*", "gmlp_*")
REPORTED = ("posmlp_t", "gmlp_s")
WINDOWS = (14, 14, 14, 7)  # Table 11, per stage
GROUPS = (8, 16, 32, 64)
GAUSSIAN = ("sigma", "freeze_delta")  # options that only a Gaussian has


def gating_unit(
    dim: int,
    *,
    relation: RelationName,
    hidden_ratio: float = 4.0,
    window: PerStage = WINDOWS,
    shift: bool | None = None,
    groups: PerStage = GROUPS,
    sigma: Sigma = "gamma_gammaT",
    freeze_delta: bool = False,
    structure: Structure = "gate",
    norm: bool = False,
    bias: bool = True,
    init: Init = "gmlp",
    drop: float = 0.0,
    cache: bool = True,
    slot: Slot | None = None,
) -> GatedMLP:
    """Build W2 ((M u + b) * v) + b2 with the M that ``relation`` names.

    Args:
        dim: Channels C.
        relation: Form of M: "free" weights, a weight for each "offset" of two tokens,
            "offset_and_free" for the sum of both, or a "gaussian" of the offset.
        hidden_ratio: gamma, hidden width over C.
        window: Side of the windows, one for all stages or one each.
        shift: Shift the windows of every second block; None: only in dense hosts.
        groups: s, how many groups of channels have an M each, for all stages or one each (Table 4).
        sigma: "gamma_gammaT", "gamma", "alpha" or "alpha_as_released" (Table 6).
        freeze_delta: Gaussians sit on the token itself (Table 6).
        structure: "gate", "add", "concat" or "nonsplit" (Fig. 3).
        norm: LayerNorm on what is mixed (Fig. 3d).
        bias: Add b (Table 7).
        init: "gmlp" (M = 0, b = 1) or "posmlp" (M of 0.02, b = 0).
        drop: Dropout after the last linear layer.
        cache: Cache M in evaluation.
        slot: Where it goes.
    """
    side, count = _of_stage("window", window, slot), _of_stage("groups", groups, slot)
    tokens: TokenRelation
    if relation == "free":
        tokens = TokenFC(side, bias=bias, init=init)
    elif relation == "gaussian":
        tokens = QuadraticRelation(
            side, count, sigma=sigma, freeze_delta=freeze_delta, bias=bias, cache=cache
        )
    else:
        has_free_matrix = relation == "offset_and_free"
        tokens = LookupRelation(side, count, bias=bias, has_weight=has_free_matrix, cache=cache)
    shifted = _shifted(shift, slot)
    return GatedMLP(
        dim, hidden_ratio, tokens, structure=structure, norm=norm, shifted=shifted, drop=drop
    )


@register_mixer(
    "sgu",
    kind="token",
    source="gMLP (NeurIPS 2021), Sec. 2.1; PosMLP (MM 2022), Eq. 1",
    options_on={"posmlp_*": {"init": "posmlp"}},
    named_on=("posmlp_*",),  # gMLP has it already
    published_on=("posmlp_t",),
)
@variant_of(
    gating_unit,
    fixed={"relation": "free"},
    defaults={"norm": True},
    without=("groups", "cache", *GAUSSIAN),
)
def sgu() -> None:
    """Build gMLP's gated unit over windows of N tokens: M is free, N^2 + N parameters."""


@register_mixer(
    "lrpe_m",
    kind="token",
    source="PosMLP (MM 2022), Eq. 10",
    named_on=WHOLE_MODELS,
    published_on=REPORTED,
)
@variant_of(
    gating_unit,
    fixed={"relation": "offset_and_free"},
    defaults={"groups": 1},
    without=("init", *GAUSSIAN),
)
def lrpe_m() -> None:
    """Build PosMLP's unit with M free plus a weight per offset: N^2 + (2w - 1)^2 + N parameters."""


@register_mixer(
    "lrpe",
    kind="token",
    source="PosMLP (MM 2022), Eq. 11",
    named_on=WHOLE_MODELS,
    published_on=REPORTED,
)
@variant_of(gating_unit, fixed={"relation": "offset", "groups": 1}, without=("init", *GAUSSIAN))
def lrpe() -> None:
    """Build ``glrpe`` with one group: a weight per offset, (2w - 1)^2 + N parameters."""


@register_mixer(
    "glrpe",
    kind="token",
    source="PosMLP (MM 2022), Sec. 4.1, end; Table 1",
    named_on=WHOLE_MODELS,
    published_on=REPORTED,
)
@variant_of(gating_unit, fixed={"relation": "offset"}, without=("init", *GAUSSIAN))
def glrpe() -> None:
    """Build PosMLP's unit with a weight per offset and group: s (2w - 1)^2 + N parameters.

    App. 4 prints 3 s more.
    """


@register_mixer(
    "ggqpe",
    kind="token",
    source="PosMLP (MM 2022), Eq. 12 to 15",
    named_on=("gmlp_*",),  # PosMLP has it already
    published_on=("gmlp_s",),
)
@variant_of(gating_unit, fixed={"relation": "gaussian"}, without=("init",))
def ggqpe() -> None:
    """Build PosMLP's unit with a normalised Gaussian of the offset per group: 6 s + N parameters.

    With ``groups=1`` it is GQPE.
    """


def _shifted(shift: bool | None, slot: Slot | None) -> bool:
    """Return True for every second block, if asked for or, by default, in dense prediction."""
    return slot is not None and bool(slot.block % 2) and (slot.dense if shift is None else shift)


def _of_stage(option: str, values: PerStage, slot: Slot | None) -> int:
    """Return a stage's value out of one for all or one each; later stages take the last."""
    if isinstance(values, int):
        return values
    if not values:
        raise ValueError(f"{option} must be a whole number or one per stage, got none")
    return values[min(slot.stage if slot else 0, len(values) - 1)]
