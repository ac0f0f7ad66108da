"""Backbones with swappable mixers.

Looking a backbone or mixer up imports its files alone. Importing this package is light: torch is
loaded with the first use of a name below.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from backbones.base import Backbone, FeatureInfo, Mixer, PointwiseMixer, Slot
    from backbones.factory import backbone_schema, create_backbone, create_mixer, mixer_options
    from backbones.registry import (
        list_backbones,
        list_hosts,
        list_mixers,
        register_host,
        register_mixer,
    )

__all__ = [
    "Backbone",
    "FeatureInfo",
    "Mixer",
    "PointwiseMixer",
    "Slot",
    "backbone_schema",
    "create_backbone",
    "create_mixer",
    "list_backbones",
    "list_hosts",
    "list_mixers",
    "mixer_options",
    "register_host",
    "register_mixer",
]
_MODULES = {
    "base": ("Backbone", "FeatureInfo", "Mixer", "PointwiseMixer", "Slot"),
    "factory": ("backbone_schema", "create_backbone", "create_mixer", "mixer_options"),
    "registry": ("list_backbones", "list_hosts", "list_mixers", "register_host", "register_mixer"),
}

if not TYPE_CHECKING:  # type checkers use the imports above

    def __getattr__(name: str) -> Any:
        """Import a name of the package from its module."""
        for module, names in _MODULES.items():
            if name in names:
                return getattr(importlib.import_module(f"backbones.{module}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
