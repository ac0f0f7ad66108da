"""IFFN's released checkpoints: the authors' names of tensors, and the options that they need.

Source: https://github.com/AMD-AIG-AIMA/AMD_IFFN (November 2024), for DeiT-T, S and B. Its training
writes the weights under "model", which its evaluation reads, and their average under "model_ema",
beside an argparse.Namespace; a file with that is not opened here unless its "model" is saved again.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from torch import Tensor

RELEASED = {
    "channel": True,
    "spatial": True,
    "n_branches": 2,
    "act": "gelu",
    "arb": "on",
    "norm": "layer",
    "bn_mid": True,
    "bn_out": True,
    "dw_residual": "outside",
    "dw_order": "bn_act",
}
KERNEL = re.compile(r"conv(\d+)x\d+_dw\.")
# How a released name begins, and ours.
NAMES = {
    "conv1.": "fc1.",
    "act1.move1.scale": "branches.0.alpha",
    "act1.move1.bias": "branches.0.gamma",
    "act1.move2.scale": "branches.0.beta",
    "act1.move2.bias": "branches.0.theta",
    "act2.move1.scale": "branches.1.alpha",
    "act2.move1.bias": "branches.1.gamma",
    "act2.move2.scale": "branches.1.beta",
    "act2.move2.bias": "branches.1.theta",
    "ln1.": "ln_mid.",
    "ln.": "dw.bn.",
    "conv2.": "fc2.",
    "ln2.": "ln_out.",
}


def is_released(tensors: Collection[str]) -> bool:
    """Return True if a mixer's tensors have the authors' names."""
    return "act1.move1.scale" in tensors


def from_released(
    tensors: Mapping[str, Tensor], options: Mapping[str, object]
) -> dict[str, Tensor]:
    """Rename released tensors to ours; reshape coefficients (1, 1, h / N) to (h / N,).

    A convolution of another side than the mixer's keeps its name, as it does not fit.

    Args:
        tensors: By the released names.
        options: The mixer's, by the names of ``RELEASED`` and ``kernel_size``.

    Raises:
        ValueError: Other options than the released ones, which neither names nor shapes would
            always tell. Each is named with what it has to be.
    """
    sides = {int(match[1]) for match in map(KERNEL.match, tensors) if match}
    requirements = RELEASED | ({"kernel_size": sides.pop()} if len(sides) == 1 else {})
    wrong = [name for name, value in requirements.items() if options[name] != value]
    if wrong:
        raise ValueError(
            "these are IFFN's released weights, and this mixer has "
            f"{', '.join(f'{name}={options[name]}' for name in wrong)}; build iffn with "
            f"{' '.join(f'backbone.mixer.{name}={requirements[name]}' for name in wrong)}"
        )
    side = options["kernel_size"]
    names = NAMES | {f"conv{side}x{side}_dw.": "dw.conv."}
    return {
        _renamed(key, names): value.flatten() if ".move" in key else value
        for key, value in tensors.items()
    }


def _renamed(key: str, names: Mapping[str, str]) -> str:
    for official, ours in names.items():
        if key.startswith(official):
            return ours + key.removeprefix(official)
    return key
