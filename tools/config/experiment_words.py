"""Hydra's group ``experiment``: one config for each row of configs/published with a metric."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tools.papers.published import Row
from tools.papers.row_names import UNTRAINED


def experiment_config(row: Row) -> dict[str, Any]:
    """What a config file of this row would hold.

    Weights that the row starts from are asked for, since a run from random ones is another.
    """
    train = row.train
    chosen = {
        "task": row.task,
        "head": row.head,
        "data": train.data,
        "backbone": row.backbone,
        "protocol": train.protocol,
        "trainer": train.trainer,
        "recipe": train.recipe,
    }
    options = {key: value for key, value in row.options.items() if key not in UNTRAINED}
    overrides = dict(train.overrides)
    backbone = _plain(options) | _plain(overrides.pop("backbone", {}))
    if row.head_options:
        overrides["head"] = _plain(row.head_options) | _plain(overrides.get("head", {}))
    content: dict[str, Any] = {
        "defaults": [{f"override /{group}": name} for group, name in chosen.items() if name],
        "paper": {"name": row.paper, "table": row.table, "experiment": row.name},
        **_plain(overrides),
    }
    if backbone:
        content["backbone"] = backbone
    if train.start:
        content["require_pretrained"] = True
    return content


def check_runs(row: Row, typed: Sequence[str] = ()) -> None:
    """Refuse to train a row of which a setting is published nowhere and not typed either.

    Args:
        row: The row.
        typed: The command's options.

    Raises:
        ValueError: The row's own reason.
    """
    options = dict(re.sub(r"^\++", "", word).partition("=")[::2] for word in typed)
    evaluates = options.get("mode", "fit") != "fit"
    if row.train.cannot_run and not evaluates and not options.keys() & set(row.train.needs):
        raise ValueError(f"experiment={row.name} cannot run: {row.train.cannot_run}")


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _plain(v) if isinstance(v, Mapping) else v for k, v in values.items()}
