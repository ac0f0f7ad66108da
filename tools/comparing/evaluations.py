"""Compare evaluations: only runs with equal evaluations share a table."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Mapping, Sequence
from typing import Any

from tasks.engine.family import families
from tools.cli.paths import CONFIGS
from tools.cli.yaml_files import read_yaml
from tools.comparing.run_records import RunRecord

UNKNOWN = "unknown"
# Options of ``data`` that only concern training or loading; all others concern evaluation.
TRAINING = (
    "root", "num_classes", "batch_size", "eval_batch_size", "num_workers", "cache_dir", "train_*",
    "num_train", "repeated_augmentation", "resident", "token_*", "augmentation",
    "augmentation.*", "scale_jitter",
    "flip", "photometric", "cat_max_ratio", "crop_size", "with_mask", "_*",
)  # fmt: skip
# Exceptions that concern evaluation, in any group.
EVALUATION = (
    "data.augmentation._target_", "data.augmentation.crop_pct", "data.augmentation.interpolation",
    "head.test_*", "trainer.limit_val_batches",
)  # fmt: skip
# Values that equal a missing option, as in runs older than the option.
USUAL: Mapping[str, Any] = {
    "data.augmentation.crop_pct": 0.9,
    "data.augmentation.interpolation": "bicubic",
    "data.class_order": "text",
    "data.skip_unusable_boxes": False,
    "trainer.limit_val_batches": 1.0,
}


def describe_evaluation(run: RunRecord) -> dict[str, Any]:
    """Return the data and settings of a finished run's evaluation, by readable names.

    Datasets are identified by the fingerprints in summary.json. Runs of older versions without
    fingerprints only share a table with runs of the same data option and folder.
    """
    data = run.summary.get("data") or {}
    prints, images = data.get("fingerprints") or {}, data.get("samples") or {}
    family = families().get(run.task)
    targets, unit = (family.targets, family.unit) if family else (("classes",), "images")
    validated = f"validation {unit}"
    evaluation: dict[str, Any] = {"data": data_name(run)}
    if all(prints.get(name) for name in (*targets, "val")):
        evaluation |= {name: f"{data.get(name)} ({prints[name][:6]})" for name in targets}
        evaluation[validated] = f"{images.get('val')} ({prints['val'][:6]})"
    else:
        evaluation["data.root"] = None if uses_sample_data(run) else run.config.get("data.root")
        evaluation |= dict.fromkeys(targets, UNKNOWN)
        evaluation[validated] = images.get("val", UNKNOWN)
    for key, value in sorted(run.config.items()):
        if is_evaluation(key) and value is not None and value != USUAL.get(key):
            evaluation[key] = value
    return evaluation


def is_evaluation(key: str) -> bool:
    """Return True if a setting, by its dotted name, decides what is evaluated or how."""
    if any(fnmatch.fnmatchcase(key, pattern) for pattern in EVALUATION):
        return True
    group, _, option = key.partition(".")
    return group == "data" and not any(fnmatch.fnmatchcase(option, pattern) for pattern in TRAINING)


def group_by_evaluation(
    runs: Sequence[RunRecord], free_keys: Sequence[str] = ()
) -> list[tuple[dict[str, Any], list[RunRecord]]]:
    """Group runs of one task by their evaluation, in order of first appearance.

    Returns:
        For each group its differences from other groups by name, and its runs. Options of ``data``
        are compared between groups of the same dataset.
    """
    groups: dict[str, tuple[dict[str, Any], list[RunRecord]]] = {}
    for run in runs:
        evaluation = {
            name: value for name, value in describe_evaluation(run).items() if name not in free_keys
        }
        key = json.dumps(evaluation, sort_keys=True, default=str)
        groups.setdefault(key, (evaluation, []))[1].append(run)
    evaluations = [evaluation for evaluation, _ in groups.values()]
    return [(_differing(evaluation, evaluations), group) for evaluation, group in groups.values()]


def _differing(
    reference: Mapping[str, Any], evaluations: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    names = dict.fromkeys(name for evaluation in evaluations for name in evaluation)
    same_data = [entry for entry in evaluations if entry.get("data") == reference.get("data")]
    return {
        name: reference.get(name)
        for name in names
        if any(
            str(evaluation.get(name)) != str(reference.get(name))
            for evaluation in (same_data if name.startswith("data.") else evaluations)
        )
    }


def format_evaluation(evaluation: Mapping[str, Any]) -> str:
    """Format the differences: ``data=imagenet, data.image_size=224``."""
    parts = []
    for name, value in evaluation.items():
        text = "null" if value is None else str(value)
        text = text.lower() if isinstance(value, bool) else text
        option = name == "data" or "." in name
        parts.append(f"{name}={text}" if option else f"{name} {text}")
    return ", ".join(parts)


def data_name(run: RunRecord) -> str:
    """Return the command-line name of the run's data."""
    target = run.config.get("data._target_")
    for path in sorted((CONFIGS / "data").glob("*.yaml")):
        if read_yaml(path)["data"]["_target_"] == target:
            return path.stem
    return str(target)


def uses_sample_data(run: RunRecord) -> bool:
    """Return True if a run used generated sample data."""
    return str(run.config.get("data._target_", "")).startswith("datamodules.sample.")
