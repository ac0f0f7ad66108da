"""Forms of mixers that were the default when a checkpoint or an export was written."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from backbones.base import Backbone
from backbones.checkpoints.equations import KINDS

logger = logging.getLogger(__name__)
# Defaults of earlier versions by mixer and option, each of which the mixer has as an attribute.
# A record without the option is of such a version.
EARLIER: dict[str, dict[str, Any]] = {
    "retention": {"form": "paper"},
    "wave": {"form": "paper"},
    "rala": {"inclusive": False},
    "sparse_moe": {"noise": 0.0},
    "bi_wkv": {"whole_quarters": True},
    "rwkv_channel_mix": {"whole_quarters": True},
}
CLASSES = {
    "retention": "ManhattanAttention",
    "wave": "PhaseAwareMixing",
    "rala": "RankAugmentedLinearAttention",
    "sparse_moe": "SparseMoE",
    "bi_wkv": "BidirectionalWKV",
    "rwkv_channel_mix": "RWKVChannelMix",
}
ADDED = {"form", "whole_quarters"}  # options that exports of those versions lack


def take_recorded_forms(backbone: Backbone, record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Change mixers to the form of a checkpoint's record, unless their option was typed.

    Args:
        backbone: Any backbone.
        record: Options that the checkpoint's network was built with; empty in other tools' files.

    Returns:
        The record with the options that its version lacked.
    """
    complete = {**record, **{kind: _completed(record.get(kind)) for kind in KINDS}}
    for kind in KINDS:
        theirs, ours = _listed(complete[kind]), _listed(backbone.record.get(kind))
        for name in {str(one.get("name")) for one in ours} & EARLIER.keys():
            entries = [one for one in theirs if one.get("name") == name]
            for option in EARLIER[name]:
                values = {one[option] for one in entries}
                typed = any(option in one for one in _listed(backbone.made_by.get(kind)))
                if len(values) == 1 and not typed:
                    _set(backbone, kind, name, {option: values.pop()})
    return complete


def take_earlier_forms(backbone: Backbone, tensors: Mapping[str, Tensor]) -> None:
    """Change mixers to the form that an export without a record shows.

    Options that the config names stay as they are. Exports name all options of their version.

    Args:
        backbone: Built from a config of a toolkit or timm.
        tensors: By their names in the backbone.
    """
    for kind in KINDS:
        given = backbone.made_by.get(kind) or {}
        record = backbone.record.get(kind)
        if not isinstance(given, Mapping) or not isinstance(record, Mapping):  # of later versions
            continue
        name = str(record["name"])
        rest = record.keys() - EARLIER.get(name, {}).keys() - {"name"}
        if name in EARLIER and rest and rest <= given.keys():
            new = EARLIER[name].keys() & ADDED - given.keys()
            _set(backbone, kind, name, {option: EARLIER[name][option] for option in new})
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


def _set(backbone: Backbone, kind: str, name: str, options: Mapping[str, Any]) -> None:
    """Set options of all mixers of a name, and record them."""
    parts = [
        part
        for part in backbone.modules()
        if CLASSES[name] in {base.__name__ for base in type(part).__mro__}
    ]
    changed = {
        option: value
        for option, value in options.items()
        if any(getattr(part, option) != value for part in parts)
    }
    for part in parts:
        for option, value in changed.items():
            setattr(part, option, value)
    if changed:
        entries = [
            {**one, **changed} if one.get("name") == name else one
            for one in _listed(backbone.record[kind])
        ]
        is_listed = isinstance(backbone.record[kind], list)
        backbone.record = {**backbone.record, kind: entries if is_listed else entries[0]}
        logger.info("%s: %s has %s, as in the checkpoint", backbone.name, name, changed)


def _completed(mixers: Any) -> Any:
    """Return mixers of a record with the options that their version lacked."""
    if isinstance(mixers, list | tuple):
        return [_completed(one) for one in mixers]
    return {**EARLIER.get(mixers.get("name"), {}), **mixers} if mixers else mixers


def _listed(mixers: Any) -> list[Mapping[str, Any]]:
    """Return the mappings of one mixer, or of one per stage or block; names alone are left out."""
    entries = mixers if isinstance(mixers, list | tuple) else [mixers]
    return [one for one in entries if isinstance(one, Mapping)]
