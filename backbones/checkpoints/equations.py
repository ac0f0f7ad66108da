"""Comparison of the equations of two networks, since variants may have equal shapes.

A network records the name and options that it was built with, and our checkpoints store the record.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RECORD = "network"  # the entry of a checkpoint
# Options without effect on numbers in evaluation: initialisation, dropout, speed.
IDLE = {"drop", "init", "cache", "fused"}
KINDS = {"mixer": "channel mixer", "token_mixer": "token mixer"}


def plain(value: Any) -> Any:
    """Return a value as a checkpoint stores it: tuples as lists, mappings as dictionaries."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any], moved: set[str]) -> list[str]:
    """Describe the differences between the equations of two records.

    Args:
        theirs: Record of the checkpoint.
        ours: Record of the network.
        moved: Kinds of mixers ("mixer", "token_mixer") that take weights of the checkpoint.
    """
    found = []
    for kind, noun in KINDS.items():
        one, other = (dict(record.get(kind) or {}) for record in (theirs, ours))
        if kind not in moved or not one or not other:
            continue
        first, second = one.pop("name", None), other.pop("name", None)
        if first != second:
            found.append(f"{noun} {second} instead of {first}")
        found += _changed(f"backbone.{kind}.", one, other)
    return found + _changed("backbone.", theirs.get("options") or {}, ours.get("options") or {})


def _changed(group: str, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    return [
        f"{group}{key}={value} instead of {theirs[key]}"
        for key, value in ours.items()
        if key in theirs and key not in IDLE and theirs[key] != value
    ]
