"""Exports of earlier versions, whose configs leave out options that had another default then."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from backbones.base import Backbone

logger = logging.getLogger(__name__)


def take_earlier_forms(backbone: Backbone, tensors: Mapping[str, Tensor]) -> None:
    """Change mixers to the form that tensors show and that was the default when they were saved.

    Options that the config names stay as they are.

    Args:
        backbone: Built from a config of a toolkit or timm.
        tensors: By their names in the backbone.
    """
    given = backbone.made_by.get("mixer") or {}
    if not isinstance(given, Mapping):  # lists are of later versions
        return
    changed: dict[str, Any] = {}
    for prefix, mixer in backbone.mixers().items():
        own = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        changed |= mixer.take_earlier_form(own, given)
    if changed and isinstance(backbone.record.get("mixer"), Mapping):
        backbone.record = {**backbone.record, "mixer": {**backbone.record["mixer"], **changed}}
        logger.info("%s is of an earlier version: mixers are built with %s", backbone.name, changed)
