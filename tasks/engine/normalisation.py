"""Mean and deviation of images, with interpolation and crop, that pretrained weights expect.

Order: typed values, those that the checkpoint records, those that timm declares for the network,
ImageNet's. Only a new training, or an evaluation of another tool's weights, takes them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from backbones import Backbone
from backbones.checkpoints.opening import Checkpoint, open_checkpoint
from tasks.engine.checkpoints.entries import BUILT
from tasks.engine.run_folder.run_config import RunConfig
from tasks.engine.run_folder.saved_runs import open_saved

IMAGENET = {"mean": IMAGENET_DEFAULT_MEAN, "std": IMAGENET_DEFAULT_STD}
DENSE = "data_preprocessor"  # of head.model, in the units of bytes
HUB = "config.json"  # beside weights of timm
Weights = str | Path | Checkpoint | bool | None


def expected_preprocessing(backbone: Backbone, weights: Weights) -> tuple[dict[str, Any], str]:
    """Return what weights expect of images, for values from 0 to 1, and its source.

    Args:
        backbone: Network of the weights.
        weights: Its checkpoint, opened or as a path; True for timm's own weights. Without any, the
            result is empty.
    """
    if not weights:
        return {}, ""
    name = backbone.made_by.get("model") or backbone.name
    source, values = f"timm's weights of {name}", dict(backbone.pretrained_cfg)
    recorded = None if isinstance(weights, bool) else _recorded(weights)
    if recorded is not None:
        source = weights.path if isinstance(weights, Checkpoint) else str(weights)
        values = recorded
    return values, source


def take_preprocessing(
    config: RunConfig, augmentation: Any, backbone: Backbone, weights: Weights
) -> str | None:
    """Set the open options of a config to what its weights expect; return a line if any changed.

    Args:
        config: Config of the run, changed in place.
        augmentation: The data module's augmentation, or None in dense prediction.
        backbone: The run's network.
        weights: As for ``expected_preprocessing``.
    """
    data, head = config.data, config.head
    if data.get("bands") is not None or not (augmentation or "model" in head):
        return None
    values, source = expected_preprocessing(backbone, weights)
    if augmentation is None:
        group, settings = "head.model.data_preprocessor", _take_dense(head, values)
    else:
        group, settings = "data.augmentation", _take(data, augmentation, values)
    if not settings:
        return None
    text = ", ".join(f"{key}={_format(value)}" for key, value in settings.items())
    return f"Preprocessing of the weights: {group}: {text} ({source})"


def _take(data: dict[str, Any], augmentation: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(augmentation)} if is_dataclass(augmentation) else set()
    kind = type(augmentation)
    before = data["augmentation"] or {"_target_": f"{kind.__module__}.{kind.__qualname__}"}
    settings = {
        key: _as_list(value)
        for key, value in values.items()
        if key in names
        and key not in before
        and _as_list(value) != _as_list(getattr(augmentation, key))
    }
    if settings:
        data["augmentation"] = {**before, **settings}
    return settings


def _take_dense(head: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    model = head["model"] or {}
    before = model.get(DENSE) or {}
    if any(str(key).startswith(DENSE) for key in head.get("options") or {}):
        return {}
    settings = {
        key: [round(255 * value, 6) for value in values[key]]
        for key, usual in IMAGENET.items()
        if key in values and key not in before and tuple(values[key]) != usual
    }
    if settings:
        head["model"] = {**model, DENSE: {**before, **settings}}
    return settings


def _recorded(weights: str | Path | Checkpoint) -> dict[str, Any] | None:
    """Return the statistics that a run, a checkpoint of ours or a folder of timm's records."""
    opened = weights if isinstance(weights, Checkpoint) else None
    saved = open_saved(weights.path if isinstance(weights, Checkpoint) else weights)
    beside = saved.file.parent / HUB
    if saved.run is not None:
        return _statistics(saved.run.config)
    if beside.is_file():
        return _hub_statistics(beside)
    checkpoint = opened or open_checkpoint(saved.file, values_only=True)
    if checkpoint.format is None:
        return None
    return _statistics(checkpoint.values.get(BUILT) or {})


def _statistics(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return mean and deviation of a run's images, or None where they are of another kind."""
    data, head = config.get("data") or {}, config.get("head") or {}
    if data.get("bands") is not None:
        return None
    dense = (head.get("model") or {}).get(DENSE) or {}
    scaled = {key: [value / 255 for value in values] for key, values in dense.items()
              if key in IMAGENET}  # fmt: skip
    options = data.get("augmentation") or {}
    options = options if isinstance(options, Mapping) else {}  # a detector's is a word
    return {key: options.get(key) or scaled.get(key) or usual for key, usual in IMAGENET.items()}


def _hub_statistics(file: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))["pretrained_cfg"]
        values = {key: content[key] for key in ("interpolation", "crop_pct") if key in content}
        return {key: [float(part) for part in content[key]] for key in IMAGENET} | values
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, list | tuple) else value


def _format(value: Any) -> str:
    is_list = isinstance(value, list)
    return f"[{','.join(f'{part:g}' for part in value)}]" if is_list else str(value)
