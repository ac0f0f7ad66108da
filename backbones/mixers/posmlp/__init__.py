"""PosMLP's and gMLP's gating units as token mixers.

In reading order: ``relations`` (Eq. 9 to 15, the matrices over the tokens of a window),
``gated_mlp`` (the unit) and ``posgu`` (the registered variants); ``matrix_cache`` remembers the
matrices in evaluation, ``contiguous_groups`` is the unit for large maps, ``fused`` computes both
layers by products of our own.
"""

from backbones.layers.fused_forms import FUSED_FORMS
from backbones.mixers.posmlp import fused, posgu
from backbones.mixers.posmlp.gated_mlp import GatedMLP

FUSED_FORMS[GatedMLP] = fused

__all__ = ["posgu"]
