"""The two halves of IFFN, each by itself, and IFFN between batch norms.

Source: Xu et al., ICML 2024, Table 2, https://proceedings.mlr.press/v235/xu24n.html.
"""

from __future__ import annotations

from backbones.mixers.iffn.mixer import IFFN, NO_CLASS_TOKEN
from backbones.options import variant_of
from backbones.registry import register_mixer

# IFFN as the paper's text and CMT suggest it, before the authors released their code.
BATCH_FORM = {"norm": "batch", "dw_residual": False}


@register_mixer(
    "iffn_bn",
    kind="channel",
    source="IFFN (ICML 2024), Eq. 5, Sec. 4.3, Fig. 4b, with CMT's batch norms",
)
@variant_of(IFFN, defaults=BATCH_FORM)
def iffn_bn() -> None:
    """Build IFFN with batch norms and no shortcut around the depthwise block.

    Before the authors released their code, this was the form of ``iffn``.
    """


@register_mixer(
    "affn",
    kind="channel",
    source="IFFN (ICML 2024), Eq. 5; Table 2, row 'w/ channel'",
    ignores_order=True,
    host_overrides=NO_CLASS_TOKEN,
    published_on=("deit_t",),
)
@variant_of(
    IFFN,
    fixed={"spatial": False},
    defaults={"bn_mid": True, "bn_out": True, "norm": "batch"},
    without=("channel", "kernel_size", "dw_residual", "dw_order", "grid"),
)
def affn() -> None:
    """Build IFFN without its depthwise block, each token by itself."""


@register_mixer(
    "iffn_spatial",
    kind="channel",
    source="IFFN (ICML 2024), Sec. 4.3; Table 2, row 'w/ spatial'",
    host_overrides=NO_CLASS_TOKEN,
    published_on=("deit_t",),
)
@variant_of(
    IFFN,
    fixed={"channel": False},
    defaults={"bn_mid": False, "bn_out": False, **BATCH_FORM},
    without=("spatial", "n_branches", "arb", "init"),
)
def iffn_spatial() -> None:
    """Build an FFN of full width with IFFN's depthwise block after its activation."""
