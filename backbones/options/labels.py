"""Short names of mixers as users type them, for labels and names of folders."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

OWN = "own"  # the host's module in a list of mixers


def mixer_names(entry: Any) -> list[str]:
    """Return the names in ``mixer=`` or ``token_mixer=``, which may be a list."""
    items = entry if isinstance(entry, list | tuple) else [entry]
    names = (item.get("name") if isinstance(item, Mapping) else item for item in items)
    return [name for name in names if isinstance(name, str)]


def matches_of(entry: Any) -> list[Any]:
    """Return what ``match`` asks of the mixers in ``mixer=`` or ``token_mixer=``, without nulls."""
    items = entry if isinstance(entry, list | tuple) else [entry]
    patterns = (item.get("match") for item in items if isinstance(item, Mapping))
    return [match for match in patterns if match is not None]


def mixer_label(entry: Any) -> str:
    """Return a label, such as ``sbm``, or of a list ``3xffnified-attention``; may be empty."""
    if not isinstance(entry, list | tuple):
        return next(iter(mixer_names(entry)), "")
    labels = (next(iter(mixer_names(item)), OWN) for item in entry)
    runs = ((label, len(list(group))) for label, group in itertools.groupby(labels))
    return "-".join(f"{count}x{label}" if count > 1 else label for label, count in runs)
