"""Names of tensors: the prefixes that wrappers leave, and renaming by patterns."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from torch import Tensor

MMPRETRAIN_CLASSIFIER = "head.fc."
WRAPPERS = ("module.", "_orig_mod.", "model.", "detector.", "segmentor.")


def strip_wrappers(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Take off prefixes that all keys share; of a whole model keep backbone and classifier."""
    stripped = bool(state_dict)
    while stripped:
        stripped = False
        for wrapper in WRAPPERS:
            if all(key.startswith(wrapper) for key in state_dict):
                state_dict = {key.removeprefix(wrapper): value for key, value in state_dict.items()}
                stripped = True
    # LVT's authors call their stages backbone.0 to backbone.3; no backbone of ours is a mere list.
    if any(re.match(r"backbone\.\D", key) for key in state_dict):
        kept = ("backbone.", "classifier.", MMPRETRAIN_CLASSIFIER)
        state_dict = {
            # Anchored: FFNet_seg's own backbone has a head.fc.
            re.sub(rf"^{re.escape(MMPRETRAIN_CLASSIFIER)}", "classifier.", k).removeprefix(
                "backbone."
            ): v
            for k, v in state_dict.items()
            if k.startswith(kept)
        }
    return state_dict


def rename(
    state_dict: Mapping[str, Tensor], patterns: Iterable[tuple[str, str]]
) -> dict[str, Tensor]:
    """Rename keys by regular expressions and their replacements, one after the other."""
    renamed = {}
    for key, value in state_dict.items():
        for pattern, replacement in patterns:
            key = re.sub(pattern, replacement, key)
        renamed[key] = value
    return renamed
