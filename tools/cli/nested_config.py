"""Nested configs: flatten them to dotted names, merge them deeply."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten a nested config to {dotted name: value}; a list is one value."""
    if not isinstance(config, Mapping):
        return {prefix: list(config) if isinstance(config, tuple) else config}
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


def deep_merge(base: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two nested dicts; values of ``override`` override those of ``base``."""
    result = dict(base)
    for key, value in override.items():
        are_mappings = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = deep_merge(result[key], value) if are_mappings else value
    return result
