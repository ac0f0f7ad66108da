"""Nested configs: flat by dotted name, and merged deeply."""

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


def merge(config: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with the entries of another one, which win; nested ones are merged."""
    result = dict(config)
    for key, value in other.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merge(result[key], value) if both else value
    return result
