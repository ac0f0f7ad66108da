"""How a row of a paper is trained, as configs/published says it."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tools.cli.nested_config import merge


@dataclass(frozen=True)
class Training:
    """What a row trains with; configs/published/README.md explains the fields.

    ``start`` is what trains the weights that the row starts from, as it is typed behind run.py.
    A row that ``cannot_run`` as it is runs with any of the options that it ``needs``.
    """

    data: str = ""
    recipe: str | None = None
    protocol: str | None = None
    trainer: str = "ddp"
    start: str | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    cannot_run: str | None = None
    needs: Sequence[str] = ()


def training_of(
    backbone: str, options: str, shared: Mapping[str, Any], own: Mapping[str, Any]
) -> Training:
    """The training of a row, whose own fields win over those that its table shares.

    ``overrides`` of both are merged. ``recipe`` and ``start`` may be tables of patterns of
    backbones, of which the first that fits counts.

    Args:
        backbone: The row's; ``start`` may have ``{backbone}`` for it.
        options: The row's as they are typed; ``start`` may have ``{options}`` for them.
        shared: What the table says.
        own: What the row says.

    Raises:
        TypeError: A field that is not known.
        ValueError: No pattern fits.
    """
    merged = {**shared, **own}
    merged["overrides"] = merge(shared.get("overrides", {}), own.get("overrides", {}))
    for key in ("recipe", "start"):
        if isinstance(merged.get(key), Mapping):
            merged[key] = _of_backbone(key, merged[key], backbone)
    if merged.get("start"):
        merged["start"] = merged["start"].format(backbone=backbone, options=options).strip()
    return Training(**merged)


def _of_backbone(key: str, table: Mapping[str, str | None], backbone: str) -> str | None:
    for pattern, value in table.items():
        if fnmatch.fnmatchcase(backbone, pattern):
            return value
    raise ValueError(f"{key} has {', '.join(table)} and nothing for {backbone}")
