"""Forms of mixers that were the default when a checkpoint or an export was written."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from backbones.base import Backbone
from backbones.checkpoints.equations import KINDS
from backbones.options import mixer_names

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
    networks = (record, backbone.record)
    if EARLIER.keys().isdisjoint(n for r in networks for k in KINDS for n in mixer_names(r.get(k))):
        return record
    complete = {**record, **{kind: _completed(record.get(kind)) for kind in KINDS}}
    for kind in KINDS:
        recorded, ours = _entries(complete[kind]), _entries(backbone.record.get(kind))
        for name in {str(entry.get("name")) for entry in ours} & EARLIER.keys():
            entries = [entry for entry in recorded if entry.get("name") == name]
            for option in EARLIER[name]:
                values = {entry[option] for entry in entries}
                is_option_set = any(
                    option in entry for entry in _entries(backbone.made_by.get(kind))
                )
                if len(values) == 1 and not is_option_set:
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
        mixer_options = backbone.made_by.get(kind) or {}
        record = backbone.record.get(kind)
        if not isinstance(mixer_options, Mapping) or not isinstance(
            record, Mapping
        ):  # of later versions
            continue
        name = str(record["name"])
        rest = record.keys() - EARLIER.get(name, {}).keys() - {"name"}
        if name in EARLIER and rest and rest <= mixer_options.keys():
            added_options = EARLIER[name].keys() & ADDED - mixer_options.keys()
            _set(backbone, kind, name, {option: EARLIER[name][option] for option in added_options})
    mixer_options = backbone.made_by.get("mixer") or {}
    if not isinstance(mixer_options, Mapping):  # lists are of later versions
        return
    changes: dict[str, Any] = {}
    for prefix, mixer in backbone.mixers().items():
        inside = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        changes |= mixer.take_earlier_form(inside, mixer_options)
    if changes and isinstance(backbone.record.get("mixer"), Mapping):
        backbone.record = {**backbone.record, "mixer": {**backbone.record["mixer"], **changes}}
        logger.info("%s is of an earlier version: mixers are built with %s", backbone.name, changes)


def _set(backbone: Backbone, kind: str, name: str, options: Mapping[str, Any]) -> None:
    """Set options of all mixers of a name, and record them."""
    parts = [
        part
        for part in backbone.modules()
        if CLASSES[name] in {base.__name__ for base in type(part).__mro__}
    ]
    updates = {
        option: value
        for option, value in options.items()
        if any(getattr(part, option) != value for part in parts)
    }
    for part in parts:
        for option, value in updates.items():
            setattr(part, option, value)
    if updates:
        entries = [
            {**entry, **updates} if entry.get("name") == name else entry
            for entry in _entries(backbone.record[kind])
        ]
        is_listed = isinstance(backbone.record[kind], list)
        backbone.record = {**backbone.record, kind: entries if is_listed else entries[0]}
        logger.info("%s: %s has %s, as in the checkpoint", backbone.name, name, updates)


def _completed(mixers: Any) -> Any:
    """Return mixers of a record with the options that their version lacked."""
    if isinstance(mixers, list | tuple):
        return [_completed(entry) for entry in mixers]
    return {**EARLIER.get(mixers.get("name"), {}), **mixers} if mixers else mixers


def _entries(mixers: Any) -> list[Mapping[str, Any]]:
    """Return the mappings of one mixer, or of one per stage or block; names alone are left out."""
    entries = mixers if isinstance(mixers, list | tuple) else [mixers]
    return [entry for entry in entries if isinstance(entry, Mapping)]
