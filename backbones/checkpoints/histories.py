"""Reading checkpoints of the MM toolkits without running code from them.

Beside the weights mmengine keeps histories of its losses, as objects of a class of its own around
numpy arrays, which torch's weights-only reader refuses. Nobody here needs them: each of these is
replaced by an object that does nothing, and every other name is refused as before.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Self

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

HISTORIES = re.compile(
    r"mmengine\.logging\.history_buffer\.HistoryBuffer|builtins\.getattr|__builtin__\.getattr|"
    r"numpy\.(core|_core)\.multiarray\.(_reconstruct|scalar)|numpy\.(ndarray|dtype)|"
    r"numpy\.(core|_core)\.numeric\._frombuffer|numpy\.dtypes\.\w+|builtins\.slice"
)


class Inert:
    """Takes any arguments, attributes and state, and does nothing with them."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:  # noqa: D102
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def holds_histories(path: Path) -> bool:
    """Whether all that keeps torch from reading a file are mmengine's histories."""
    try:
        names = get_unsafe_globals_in_checkpoint(path)
    except Exception:  # whatever foreign bytes make it raise: it is no such file
        return False
    return bool(names) and all(HISTORIES.fullmatch(name) for name in names)


def load_without_histories(path: Path) -> object:
    """What ``torch.load`` gives, with an ``Inert`` in the place of every history."""
    names = get_unsafe_globals_in_checkpoint(path)
    with safe_globals([(Inert, name) for name in names]):
        return torch.load(path, map_location="cpu", weights_only=True)
