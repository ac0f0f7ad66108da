"""Narrow variants of two timm networks, with which old runs and exports fit into the repository."""

import functools

from timm.models import _registry

# A few thousand weights each; dense prediction takes Swin, as DeiT's pyramid has 256 channels.
NARROW = {
    "deit_tiny_patch16_224": {"embed_dim": 12, "depth": 2, "num_heads": 3},
    "swin_tiny_patch4_window7_224": {
        "embed_dim": 4, "depths": (1, 1, 1, 1), "num_heads": (1, 1, 1, 2),
    },
}  # fmt: skip


def narrow_models() -> dict:
    return {
        name: functools.partial(_registry._model_entrypoints[name], **sizes)
        for name, sizes in NARROW.items()
    }


def narrow_timm() -> None:
    _registry._model_entrypoints.update(narrow_models())
