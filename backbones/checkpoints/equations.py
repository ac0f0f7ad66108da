"""Comparison of the equations of two networks, since variants may have equal shapes.

A network records the name and options that it was built with, and our checkpoints store the record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

RECORD = "network"  # the entry of a checkpoint
FINGERPRINT = "fingerprint"  # the entry of a record; see ``behaviour``
SOURCE = "source"  # folder in a run folder with the code that the run was trained by
START = "initial weights"  # of a fingerprint: which the function of given weights leaves aside
TOLERANCE = 1e-5  # of answers over their root mean square, for other processors and threads
# Options without effect on numbers in evaluation: initialisation, dropout, speed.
IDLE = {"drop", "init", "cache", "fused"}
KINDS = {"mixer": "channel mixer", "token_mixer": "token mixer"}


def plain_value(value: Any) -> Any:
    """Return a value as a checkpoint stores it: tuples as lists, mappings as dictionaries."""
    if isinstance(value, Mapping):
        return {str(key): plain_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(item) for item in value]
    return value


def first_change(
    file_answers: Mapping[str, Sequence[float]], ours: Mapping[str, Sequence[float]]
) -> str | None:
    """Return the first part of a network whose answers differ in two fingerprints, if any."""
    for name in file_answers:
        if name in ours:
            scale = TOLERANCE * max(file_answers[name][0], ours[name][0])
            if any(abs(a - b) > scale for a, b in zip(file_answers[name], ours[name], strict=True)):
                return name
    return None


def differences(
    file_record: Mapping[str, Any], ours: Mapping[str, Any], moved: set[str]
) -> list[str]:
    """Describe the differences between the equations of two records.

    Args:
        file_record: Record of the checkpoint.
        ours: Record of the network.
        moved: Kinds of mixers ("mixer", "token_mixer") that take weights of the checkpoint.
    """
    lines = []
    for kind, noun in KINDS.items():
        file_mixer, network_mixer = (record.get(kind) for record in (file_record, ours))
        if kind in moved and isinstance(file_mixer, Mapping) and isinstance(network_mixer, Mapping):
            lines += _mixer_changed(f"backbone.{kind}.", noun, file_mixer, network_mixer)
        elif kind in moved and file_mixer and network_mixer:
            pairs = zip_longest(
                _entries(file_mixer, network_mixer), _entries(network_mixer, file_mixer)
            )
            lines += [
                f"{text} in entry {index}"
                for index, (first, second) in enumerate(pairs)
                for text in _mixer_changed(f"backbone.{kind}.", noun, first or {}, second or {})
            ]
    return lines + _option_changes(
        "backbone.", file_record.get("options") or {}, ours.get("options") or {}
    )


def _entries(mixers: Any, like: Any) -> list[Any]:
    """Return mixers per stage or block; one for all is repeated."""
    return [mixers] * len(like) if isinstance(mixers, Mapping) else list(mixers)


def _mixer_changed(
    group: str, noun: str, file_record: Mapping[str, Any], ours: Mapping[str, Any]
) -> list[str]:
    file_options, network_options = dict(file_record), dict(ours)
    first, second = file_options.pop("name", None), network_options.pop("name", None)
    lines = [f"{noun} {second} instead of {first}"] if first != second else []
    return lines + _option_changes(group, file_options, network_options)


def _option_changes(
    group: str, file_record: Mapping[str, Any], ours: Mapping[str, Any]
) -> list[str]:
    return [
        f"{group}{key}={value} instead of {file_record[key]}"
        for key, value in ours.items()
        if key in file_record and key not in IDLE and file_record[key] != value
    ]
