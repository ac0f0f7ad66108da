"""Short names of mixers as users type them, for labels and names of folders."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

OWN = "own"  # the host's module in a list of mixers


def mixer_names(typed: Any) -> list[str]:
    """Return the names in ``mixer=`` or ``token_mixer=``, which may be a list."""
    items = typed if isinstance(typed, list | tuple) else [typed]
    names = (item.get("name") if isinstance(item, Mapping) else item for item in items)
    return [name for name in names if isinstance(name, str)]


def matches_of(typed: Any) -> list[Any]:
    """Return what ``match`` asks of the mixers in ``mixer=`` or ``token_mixer=``, without nulls."""
    items = typed if isinstance(typed, list | tuple) else [typed]
    patterns = (item.get("match") for item in items if isinstance(item, Mapping))
    return [match for match in patterns if match is not None]


def mixer_label(typed: Any) -> str:
    """Return a label, such as ``sbm``, or of a list ``3xffnified-attention``; may be empty."""
    if not isinstance(typed, list | tuple):
        return next(iter(mixer_names(typed)), "")
    labels = (next(iter(mixer_names(item)), OWN) for item in typed)
    runs = ((label, len(list(group))) for label, group in itertools.groupby(labels))
    return "-".join(f"{count}x{label}" if count > 1 else label for label, count in runs)
