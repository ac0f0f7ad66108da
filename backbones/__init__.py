"""Backbones with swappable mixers: importing this package registers every host and every mixer."""

import importlib
import pkgutil

from backbones import hosts, mixers
from backbones.base import Backbone, FeatureInfo, Mixer, PointwiseMixer, Slot
from backbones.factory import backbone_schema, create_backbone, create_mixer, mixer_options
from backbones.registry import (
    list_backbones,
    list_hosts,
    list_mixers,
    register_host,
    register_mixer,
)

for _package in (mixers, hosts):
    for _module in pkgutil.iter_modules(_package.__path__, f"{_package.__name__}."):
        importlib.import_module(_module.name)

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
