"""Names of FFNet_1D's tensors in the authors' code, and the tensors there without effect.

The authors released no weights. Their code builds about 50,000 parameters that it never uses: an
embedding of time stamps, and layers between several stages.

Source: the authors' code (github.com/ysj9909/FFNet), time_series_forecasting/models/FFNet.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from torch import Tensor

UNUSED = re.compile(
    r"(te_patch|lat_layer|smooth_layer|up_sample_conv|revin_layer|downsample_layers\.[1-9])\."
)
TOKEN = {"ffnpw1": "ffn.fc1", "ffnpw2": "ffn.fc2", "norm": "norm"}
DEPTHWISE = {"dw1": "key.conv", "dw2": "value.conv"}
BRANCHES = ("lkb_origin", "small_conv")
MERGED = "dw.lkb_reparam"  # the folded form of both branches


def convert_official_state_dict(
    state_dict: dict[str, Tensor], kernels: Sequence[int]
) -> dict[str, Tensor]:
    """Rename the authors' tensors to ours, and leave out those that their code never uses.

    Args:
        state_dict: Tensors under the authors' names; others pass unchanged.
        kernels: Sides of the large and the small kernel, which name our branches.
    """
    names = _names(kernels)
    converted = {}
    for key, value in state_dict.items():
        inner = key.removeprefix("model.")
        if UNUSED.match(inner):
            continue
        renamed = _rename(inner, names)
        if re.search(r"\.(key|value|query)\.", renamed) and value.ndim == 3:
            value = value.unsqueeze(2)  # our kernels along time are 1 x k
        converted[renamed] = value
    return converted


def is_official(state_dict: Mapping[str, Tensor]) -> bool:
    """Return True for a state dict under the authors' names."""
    return any("downsample_layers.0." in key for key in state_dict)


def _names(kernels: Sequence[int]) -> dict[str, str]:
    names = {"downsample_layers.0.0": "stem.conv", "downsample_layers.0.1": "stem.norm"}
    token = {**TOKEN, **{official: ours for official, ours in DEPTHWISE.items()}}
    names |= {f"token_mixer.{official}": f"token_mixer.{ours}" for official, ours in token.items()}
    names |= {
        f"channel_mixer.{official}": f"channel_mixer.{ours}" for official, ours in TOKEN.items()
    }
    for official, side in zip(BRANCHES, kernels, strict=False):
        ours = f"channel_mixer.query.conv.branches.1x{side}"
        names[f"channel_mixer.dw.{official}.conv"] = f"{ours}.conv"
        names[f"channel_mixer.dw.{official}.bn"] = f"{ours}.norm"
    names[f"channel_mixer.{MERGED}"] = "channel_mixer.query.conv"
    return names | {"head.linear": "forecaster.linear"}


def _rename(key: str, names: dict[str, str]) -> str:
    prefix, _, tensor = key.rpartition(".")
    block = re.match(r"stages\.0\.blocks\.(\d+)\.(.+)", prefix)
    if block:
        inner = names.get(block[2], block[2])
        return f"blocks.{block[1]}.{inner}.{tensor}"
    return f"{names[prefix]}.{tensor}" if prefix in names else key
