"""Nested configs as one dict by dotted names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return the values of a nested config by dotted name; a list is one value."""
    if not isinstance(config, Mapping):
        return {prefix: list(config) if isinstance(config, tuple) else config}
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return flat
