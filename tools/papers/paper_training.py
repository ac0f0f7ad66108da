"""Training settings of a paper's row, from configs/published."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tools.cli.nested_config import deep_merge


@dataclass(frozen=True)
class Training:
    """Training settings of a row; configs/published/README.md explains the fields.

    ``start`` is the run.py command, without ``run.py``, that trains the row's initial weights.
    If ``cannot_run`` is set, the row runs only with one of the options in ``needs``. ``also`` lists
    all data sets over which the row's figures are averages, ``data`` among them.
    """

    data: str = ""
    also: Sequence[str] = ()
    recipe: str | None = None
    protocol: str | None = None
    trainer: str = "ddp"
    start: str | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    cannot_run: str | None = None
    needs: Sequence[str] = ()


def row_training(
    backbone: str, options: str, shared: Mapping[str, Any], entry: Mapping[str, Any]
) -> Training:
    """Merge the training settings of a row with those of its table; the row's win.

    ``overrides`` are merged deeply. ``recipe`` and ``start`` may map patterns of backbone names to
    values; the first match counts.

    Args:
        backbone: The row's; replaces ``{backbone}`` in ``start``.
        options: The row's as typed; replace ``{options}`` in ``start``.
        shared: The table's settings.
        entry: The row's settings.

    Raises:
        TypeError: A field is unknown.
        ValueError: No pattern matches.
    """
    merged = {**shared, **entry}
    merged["overrides"] = deep_merge(shared.get("overrides", {}), entry.get("overrides", {}))
    for key in ("recipe", "start"):
        if isinstance(merged.get(key), Mapping):
            merged[key] = _match_backbone(key, merged[key], backbone)
    if merged.get("start"):
        merged["start"] = merged["start"].format(backbone=backbone, options=options).strip()
    return Training(**merged)


def _match_backbone(key: str, table: Mapping[str, str | None], backbone: str) -> str | None:
    for pattern, value in table.items():
        if fnmatch.fnmatchcase(backbone, pattern):
            return value
    raise ValueError(f"{key} has patterns {', '.join(table)}, but none matches {backbone}")
