"""Names of tensors in PosMLP's released checkpoints: whole models, blocks and single units.

Their ``gate_unit`` is our ``mixer.gate``. Tables of displacements are computed here, and the
biases and matrices lose their axes of length 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import Tensor

# Within a unit: the authors' names and ours. Without a table, matrix and bias have other names.
UNIT = {
    "pos.attention_centers": "relation.centers",
    "pos.attention_spreads": "relation.spreads",
    "pos.window_relative_position_bias_table": "relation.table",
    "pos.token_proj_n_bias": "relation.bias",
    "token_proj_n_weight": "relation.weight",
}
FREE_UNIT = {"proj_list.0.weight": "relation.weight", "proj_list.0.bias": "relation.bias"}
NORM = {"norm_list.0.weight": "norm.weight", "norm_list.0.bias": "norm.bias"}
COMPUTED = ("rel_indices", "relative_position_index")
# Around a unit, as patterns.
OUTSIDE = (
    (r"\blevels\.(\d+)\.pool\.", r"stages.\1.downsample."),
    (r"\blevels\.(\d+)\.encoder\.", r"stages.\1.blocks."),
    (r"\bproj_c_e\.", "mixer.fc1."),
    (r"\bproj_c_s\.", "mixer.fc2."),
    (r"\bgate_unit\.", "mixer.gate."),
    (r"\babsolute_pos_embed$", "pos_embed"),
    (r"^head\.", "classifier."),
)
OUTSIDE_BACK = (
    (r"\bstages\.(\d+)\.downsample\.", r"levels.\1.pool."),
    (r"\bstages\.(\d+)\.blocks\.", r"levels.\1.encoder."),
    (r"\bmixer\.fc1\.", "proj_c_e."),
    (r"\bmixer\.fc2\.", "proj_c_s."),
    (r"\bmixer\.gate\.", "gate_unit."),
    (r"\bpos_embed$", "absolute_pos_embed"),
    (r"^classifier\.", "head."),
)


def rename_to_ours(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the authors' tensors to ours; our names pass unchanged."""
    inside = {**UNIT, **FREE_UNIT, **NORM}
    renamed = {}
    for key, value in state_dict.items():
        if key.endswith(COMPUTED):
            continue
        official = next((name for name in inside if _ends_with(key, name)), None)
        if official is not None:
            key = key.removesuffix(official) + inside[official]
            if value.ndim == 3 and inside[official] in ("relation.bias", "relation.weight"):
                value = value[0]
        renamed[_substitute(key, OUTSIDE)] = value
    return renamed


def rename_to_authors(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename our tensors to the authors' names, without the tables computed at construction."""
    units = {key.partition("relation.")[0] for key in state_dict if "relation." in key}
    renamed = {}
    for key, value in state_dict.items():
        unit = next((unit for unit in units if key.startswith(unit + "relation.")), None)
        if unit is None:
            unit = next((u for u in units if key in (f"{u}norm.weight", f"{u}norm.bias")), None)
        if unit is not None:
            positional = (f"{unit}relation.spreads", f"{unit}relation.table")
            has_no_tables = state_dict.keys().isdisjoint(positional)
            pairs = (FREE_UNIT if has_no_tables else UNIT) | NORM
            names = {ours: official for official, ours in pairs.items()}
            ours = key.removeprefix(unit)
            if not has_no_tables and ours in ("relation.bias", "relation.weight"):
                value = value[None]
            key = unit + names[ours]
        renamed[_substitute(key, OUTSIDE_BACK)] = value
    return renamed


def _ends_with(key: str, name: str) -> bool:
    return key == name or key.endswith(f".{name}")


def _substitute(key: str, pairs: Iterable[tuple[str, str]]) -> str:
    for pattern, replacement in pairs:
        key = re.sub(pattern, replacement, key)
    return key
