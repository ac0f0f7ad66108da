"""Robustness: evaluate data part by part, cache results, and compute the published figures."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_only
from pydantic import field_validator
from rich.console import Console
from rich.table import Table

from backbones.options.schemas import OpenPart, validate
from datamodules.images.robustness import RobustnessDataModule
from tasks.classification.corruption_error import (
    ALEXNET,
    SEVERITIES,
    corruption_errors,
    mean_corruption_error,
)
from tasks.classification.family import ROBUSTNESS
from tasks.engine.run_folder.atomic_writes import write_whole
from tasks.engine.run_folder.bounded_reading import read_json
from tasks.engine.run_folder.run_config import RunConfig
from tools.cli.processes import find_launcher
from tools.runs import trainer

log_info = rank_zero_only(logging.getLogger(__name__).info)

RESULTS = "robustness.json"  # in a run folder: the finished parts
# Figures by the part that yields them.
FIGURES = {
    "imagenet": "top1",
    **ROBUSTNESS,
    "imagenet/imagenet_a": "top1_on_a",
    "imagenet/imagenet_r": "top1_on_r",
}
MCE = "mce"
# Options that leave all figures unchanged. The fingerprints of parts cover their labels, and so
# the order of the classes.
FREE = (
    "num_workers", "batch_size", "eval_batch_size", "root", "roots", "sets", "class_order",
)  # fmt: skip
Results = dict[str, dict[str, Any]]  # by part: images, fingerprint, metrics


def measure(
    engine: Trainer,
    task: Any,
    datamodule: Any,
    config: RunConfig,
    folder: Path,
) -> dict[str, float]:
    """Evaluate the parts that earlier runs with the same weights lack; print the table.

    Args:
        engine: Lightning's trainer.
        task: A ``ClassificationTask`` with its weights.
        datamodule: A ``RobustnessDataModule``.
        config: Config of the run.
        folder: Run folder; earlier runs lie beside it.

    Returns:
        The figures of complete sets.

    Raises:
        ValueError: An option limits the batches.
    """
    check_whole(config.trainer)
    key = result_key(config)
    # Processes of another launcher cannot see each other's folders, but need the same parts.
    results = {} if find_launcher() else find_results(folder.parent, key, datamodule)
    for number, part in enumerate(datamodule.parts, start=1):
        if part.name not in results:
            datamodule.choose(part)
            task.only_classes(part.columns)
            metrics = trainer.evaluate(engine, config.mode, task, datamodule)
            results[part.name] = {
                "images": len(part.files), "fingerprint": part.fingerprint, "metrics": metrics
            }  # fmt: skip
            top1 = metrics["top1"]
            log_info(f"{part.name} ({number} of {len(datamodule.parts)}): top-1 {top1:.2f} %")
        if engine.is_global_zero:
            write_results(folder / RESULTS, key, results)
    task.only_classes()
    task.class_figures = []  # of the last part alone
    values = figures(results, datamodule)
    if engine.is_global_zero:
        show(values, results, datamodule)
    return values


def check_whole(options: Mapping[str, Any]) -> None:
    """Refuse to evaluate a subset of the images.

    Raises:
        ValueError: An option limits the batches.
    """
    limit = options.get("limit_val_batches")
    if limit not in (None, 1.0):
        raise ValueError(
            f"trainer.limit_val_batches={limit} would skip images, but robustness is measured on "
            "complete sets; leave it out"
        )


def result_key(config: RunConfig) -> str:
    """Hash what figures depend on: weights, network, preparation of images, precision."""
    digest = hashlib.sha256()
    with Path(config.checkpoint).open("rb") as file:
        while block := file.read(1 << 24):
            digest.update(block)
    data = {name: value for name, value in config.data.items() if name not in FREE}
    part = {"data": data, "precision": config.trainer.get("precision")}
    part |= {"backbone": config.backbone, "head": config.head, "task": config.task}
    digest.update(json.dumps(part, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def find_results(parent: Path, key: str, datamodule: RobustnessDataModule) -> Results:
    """Return the finished parts of earlier evaluations with the same key."""
    fingerprints = {part.name: part.fingerprint for part in datamodule.parts}
    results: Results = {}
    for file in sorted(parent.glob(f"*/{RESULTS}"), reverse=True):
        entries = read_results(file, key)
        fresh = {
            name: entry
            for name, entry in entries.items()
            if name not in results and entry["fingerprint"] == fingerprints.get(name)
        }
        if fresh:
            log_info(f"{len(fresh)} of {len(fingerprints)} parts are reused from {file.parent}")
        results |= fresh
    return results


class DonePart(OpenPart):
    """Schema of a finished part in robustness.json."""

    images: int
    fingerprint: str
    metrics: dict[str, float]

    @field_validator("metrics")
    @classmethod
    def _has_top1(cls, metrics: dict[str, float]) -> dict[str, float]:
        if "top1" not in metrics:
            raise ValueError("lacks top1")
        return metrics


class DoneParts(OpenPart):
    """Schema of robustness.json."""

    key: str
    parts: dict[str, DonePart]


def read_results(file: Path, key: str) -> Results:
    """Return the parts of a file with this key; empty for a damaged file or another key."""
    try:
        content = read_json(file)
        validate(DoneParts, content)
    except ValueError:
        log_info(f"{file} is damaged; its parts are evaluated again")
        return {}
    parts: Results = content["parts"] if content["key"] == key else {}
    return parts


def write_results(file: Path, key: str, results: Results) -> None:
    """Write the file atomically."""
    write_whole(file, json.dumps({"key": key, "parts": results}, indent=1) + "\n")


def figures(results: Results, datamodule: RobustnessDataModule) -> dict[str, float]:
    """Return the published figures in percent, for complete sets only.

    Args:
        results: Results of all parts.
        datamodule: Datamodule that knows which sets are complete.
    """
    parts = {part.name for part in datamodule.parts}
    values = {
        figure: results[name]["metrics"]["top1"]
        for name, figure in FIGURES.items()
        if name in parts
    }
    if "imagenet_c" not in datamodule.found:
        return values
    errors = misclassified_shares(results)
    # Kinds of an incomplete set may be complete, unless a part lacks images.
    gaps = any(" images instead of " in line for line in datamodule.found["imagenet_c"].lacks)
    kinds = {} if gaps else corruption_errors(errors)
    mean = None if datamodule.found["imagenet_c"].lacks else mean_corruption_error(errors)
    values |= {} if mean is None else {MCE: mean}
    return values | {f"ce_{kind}": value for kind, value in kinds.items()}


def misclassified_shares(results: Results) -> dict[str, dict[int, float]]:
    """Return the share of misclassified images per kind and severity of ImageNet-C."""
    errors: dict[str, dict[int, float]] = {}
    for name, entry in results.items():
        if name.startswith("imagenet_c/"):
            _, kind, severity = name.split("/")
            errors.setdefault(kind, {})[int(severity)] = 1 - entry["metrics"]["top1"] / 100
    return errors


def show(values: Mapping[str, float], results: Results, datamodule: RobustnessDataModule) -> None:
    """Print the figures, or the reasons why they are missing; ImageNet-C by kind and severity."""
    console = Console(width=None if Console().is_terminal else 100)
    table = Table(title="robustness, in %", title_justify="left")
    for column in ("figure", "ours"):
        table.add_column(column)
    for name in (*FIGURES.values(), MCE):
        text = f"{values[name]:.2f}" if name in values else missing_reason(name, datamodule)
        if text is not None:
            table.add_row(name, text)
    console.print(table)
    errors = misclassified_shares(results)
    if not errors:
        return
    table = Table(title="imagenet_c: errors in %", title_justify="left")
    for column in ("kind", *map(str, range(1, SEVERITIES + 1)), "CE"):
        table.add_column(column)
    for kind in ALEXNET:
        cells = [errors.get(kind, {}).get(severity) for severity in range(1, SEVERITIES + 1)]
        texts = ["missing" if cell is None else f"{100 * cell:.2f}" for cell in cells]
        ce = values.get(f"ce_{kind}")
        table.add_row(kind, *texts, "incomplete" if ce is None else f"{ce:.2f}")
    console.print(table)


def missing_reason(figure: str, datamodule: RobustnessDataModule) -> str | None:
    """Return the reason why a figure is missing; None if it was not requested."""
    sets = {figure: name for name, figure in FIGURES.items() if "/" not in name}
    name = "imagenet_c" if figure == MCE else sets.get(figure)
    if name in datamodule.absent:
        return "not found"
    if name in datamodule.found and datamodule.found[name].lacks:
        return f"incomplete: {datamodule.found[name].lacks[0]}"
    return None
