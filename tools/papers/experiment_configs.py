"""Hydra's group ``experiment``: one config per row of configs/published that reports a metric."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tools.papers.published import Row
from tools.papers.row_names import UNTRAINED


def experiment_config(row: Row) -> dict[str, Any]:
    """Return the content of a row's config file.

    A row that starts from trained weights requires them, since random weights give another run.
    """
    train = row.train
    choices = {
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
    backbone = _to_dict(options) | _to_dict(overrides.pop("backbone", {}))
    if row.head_options:
        overrides["head"] = _to_dict(row.head_options) | _to_dict(overrides.get("head", {}))
    content: dict[str, Any] = {
        "defaults": [{f"override /{group}": name} for group, name in choices.items() if name],
        "paper": {"name": row.paper, "table": row.table, "experiment": row.name},
        **_to_dict(overrides),
    }
    if backbone:
        content["backbone"] = backbone
    if train.start:
        content["require_pretrained"] = True
    return content


def check_runnable(row: Row, words: Sequence[str] = ()) -> None:
    """Check that a row can be trained: its missing settings are typed.

    Raises:
        ValueError: The paper leaves a setting open.
    """
    options = dict(re.sub(r"^\++", "", word).partition("=")[::2] for word in words)
    evaluates = options.get("mode", "fit") != "fit"
    if row.train.cannot_run and not evaluates and not options.keys() & set(row.train.needs):
        raise ValueError(f"experiment={row.name} cannot run: {row.train.cannot_run}")


def _to_dict(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _to_dict(v) if isinstance(v, Mapping) else v for k, v in values.items()}
