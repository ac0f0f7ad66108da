"""Report of a run: summary, curves, pictures, and the closing table."""

from __future__ import annotations

import csv
import importlib.metadata
import io
import json
import logging
import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_only
from PIL import Image

from backbones.analysis.counting import count_macs, count_parameters
from backbones.analysis.description import describe_network, unlike_host
from backbones.base import Backbone
from datamodules import BaseDataModule
from tasks.engine.base import BaseTask
from tasks.engine.callbacks.loggers import read_rows
from tasks.engine.family import families, find_family
from tasks.engine.optimisation.automatic import (
    batches_per_step,
    describe_choice,
    describe_rate,
    steps_per_epoch,
)
from tasks.engine.run_folder.atomic_writes import make_folder, whole_file, write_whole
from tasks.engine.run_folder.bounded_reading import DamagedFile
from tasks.engine.run_folder.run_config import RunConfig
from tools.cli import tables
from tools.cli.network_names import config_network_name
from tools.cli.processes import is_first_process
from tools.runs.curves import plot_curves

log_info = rank_zero_only(logging.getLogger(__name__).info)

SUMMARY, CLASSES = "summary.json", "classes.csv"
FINISHED = "finished"  # false in the summary of a run that a signal stopped
MUCH_WAITING = 0.1  # share of the training time
PACKAGES = (
    "torch",
    "torchvision",
    "timm",
    "lightning",
    "torchmetrics",
    "onedl-mmdetection",
    "onedl-mmsegmentation",
)


def initial_facts(config: RunConfig, model: Any, shape: tuple[int, ...]) -> dict[str, Any]:
    """Collect the facts of a run that are known before it starts.

    These are its settings, the parameters of model and backbone, the backbone's multiply-adds at
    the training size, and a description of the network.
    """
    return {
        "task": config.task_name,
        "backbone": config_network_name(config.backbone),
        "mode": config.mode,
        "checkpoint": config.ckpt,
        "seed": config.seed,
        "parameters": count_parameters(model),
        "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "pooling": None if model.backbone.dense else model.backbone.pooling,
        "backbone_parameters": count_parameters(model.backbone),
        "backbone_macs": count_macs(model.backbone, shape=shape),
        "macs_at": list(shape[1:] if find_family(config.task_name).channels_first else shape),
        "network": describe_network(model.backbone),
        "strategy": config.trainer["strategy"],
    }


def input_shape(config: RunConfig, datamodule: BaseDataModule) -> tuple[int, ...]:
    """Return the shape of a training input without its batch; images state it in their options."""
    channels = datamodule.backbone_arguments.get("in_chans", 3)
    return datamodule.input_shape or (channels, *training_size(config.data))


def training_size(data: Mapping[str, Any]) -> tuple[int, int]:
    """Return the training height and width of a config's ``data``, for images wider than high."""
    edges: Any = data.get("image_size") or data.get("scale") or data.get("scene_size")
    # crop_size is (height, width), scale (longest, shortest edge).
    size = data.get("crop_size") or (edges if isinstance(edges, int) else edges[::-1])
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def log_start(
    facts: Mapping[str, Any],
    config: RunConfig,
    datamodule: BaseDataModule,
    processes: int = 1,
) -> None:
    """Log what is about to be trained, and the learning rate with its derivation."""
    batch, trainer = datamodule.training_batch(processes), config.trainer
    unit = find_family(config.task_name).unit
    epoch = datamodule.batches("train", processes)
    accumulated = batches_per_step(trainer, epoch)
    batches = f"{batch}"
    if processes > 1:
        parts = f"{processes} processes x {batch}"
        parts += f" x {accumulated} accumulated" if accumulated > 1 else ""
        batches = f"{processes * batch * accumulated} ({parts})"
    log_info(
        f"{facts['task']} with {facts['backbone']}: {_millions(facts['parameters'])} parameters"
        f"{_trained(facts)}, "
        f"{len(datamodule.dataset('train'))} training {unit} in batches of {batches}, "
        f"{_describe_length(trainer, epoch)}"
    )
    if accumulated < trainer["accumulate_grad_batches"]:
        log_info(
            f"A step has {accumulated} batches, all of an epoch, below "
            f"trainer.accumulate_grad_batches={trainer['accumulate_grad_batches']}"
        )
    images = len(datamodule.dataset("train"))
    choice = describe_choice(config, images, steps_per_epoch(trainer, epoch))
    for line in filter(None, (choice, describe_rate(config, batch, processes, accumulated))):
        log_info(line)


def log_network(backbone: Backbone) -> None:
    """Log how a network differs from its plain host, such as a missing class token."""
    unlike = unlike_host(backbone)
    if unlike is not None:
        log_info(unlike)


def _describe_length(trainer: Mapping[str, Any], batches: int) -> str:
    """Return the length of a training in epochs or steps, whichever ends it first."""
    epochs, steps = trainer["max_epochs"], trainer["max_steps"]
    total = epochs * steps_per_epoch(trainer, batches)
    if steps >= 0 and (epochs < 0 or steps < total):
        return f"{steps} step{'s' * (steps != 1)}"
    return f"{epochs} epoch{'s' * (epochs != 1)}" if epochs >= 0 else "without end"


def log_finished(folder: Path, trainer: Mapping[str, Any]) -> bool:
    """Return True if a training run is finished, and log it.

    Args:
        folder: Run folder.
        trainer: The options of the trainer; another time continues a run that was ended by time.
    """
    from tasks.engine.run_folder.schemas import read_summary

    try:
        summary = read_summary(folder / SUMMARY)
    except FileNotFoundError:
        return False
    except DamagedFile as error:
        log_info(f"{error}; the run resumes from its last checkpoint and rewrites it")
        return False
    ended = summary.get("ended_by_time")
    if not is_finished(summary) or (ended and ended["max_time"] != trainer.get("max_time")):
        return False
    metrics = summary["metrics"]
    text = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
    log_info(f"The run is already finished ({text}).")
    if ended:
        log_info(f"{_describe_end(ended)}; a larger one continues it")
    log_info(f"Run folder: {_relative_path(folder)}")
    return True


def _describe_end(ended: Mapping[str, Any]) -> str:
    return f"trainer.max_time={ended['max_time']} ended it at {ended['share']:.0%} of its schedule"


def reopen(folder: Path) -> None:
    """Remove the summary of a finished run that trains again; a new one is written at the end."""
    if is_first_process():
        (folder / SUMMARY).unlink(missing_ok=True)


def write(
    folder: Path, facts: Mapping[str, Any], task: BaseTask, datamodule: BaseDataModule
) -> None:
    """Write curves.png, preview/, answers.npz and summary.json, and print the closing table.

    Raises:
        OSError: Names the files that could not be written; all others exist.
    """
    problems: list[str] = []
    _draw(folder, facts, task, datamodule, problems)
    with _noted(problems):
        if task.class_figures:
            write_classes(folder / task.figures_file, task.class_figures)
    with _noted(problems):
        if task.sample_answers is not None and not datamodule.parts:
            task.sample_answers.write(folder)
    with _noted(problems):
        # Written last: a run with a summary is finished.
        _write_summary(folder, facts)
    table = {name: f"{value:.4g}" for name, value in facts["metrics"].items()}
    table |= describe_left_out(facts) | compare_with_paper(facts) | describe_cost(facts)
    figures = task.shown_figures(facts["mode"])
    if figures:
        print_classes(figures)
    print_table(f"{facts['task']}, {facts['backbone']}, {facts['mode']}", table, folder)
    if problems:
        raise OSError("; ".join(problems))


def write_stopped(
    folder: Path,
    facts: Mapping[str, Any],
    trainer: Trainer,
    task: BaseTask,
    datamodule: BaseDataModule | None,
) -> None:
    """Write the report of a run that a signal stopped; its summary marks it as unfinished.

    Args:
        folder: Run folder.
        facts: Facts of the run, with its seconds until now.
        trainer: Trainer of the run.
        task: Task of the run.
        datamodule: Data of the run; None draws no pictures, as the data hang.
    """
    values = trainer.callback_metrics.items()
    figures = {name.partition("/")[2]: float(v) for name, v in values if name.startswith("val/")}
    stopped = {FINISHED: False, "step": trainer.global_step, "metrics": {}, "validation": figures}
    problems: list[str] = []
    with _noted(problems):
        _write_summary(folder, {**facts, **stopped})
    average = task.ema if task.ema is not None and task.ema.is_reported else None
    with nullcontext() if average is None else average.applied_to(task.model):
        _draw(folder, facts, task, datamodule, problems)
    log_info("\n".join([*problems, f"Run folder: {_relative_path(folder)}"]))


def is_finished(summary: Mapping[str, Any]) -> bool:
    """Return True for the summary of a finished run."""
    return summary.get(FINISHED) is not False


def _draw(
    folder: Path,
    facts: Mapping[str, Any],
    task: BaseTask,
    datamodule: BaseDataModule | None,
    problems: list[str],
) -> None:
    """Write the curves of a training, and predictions of inputs spread over the prediction set."""
    with _noted(problems):
        if facts["mode"] == "fit":
            plot_curves(folder, read_rows(folder / "metrics.csv"), task.why_no_loss)
    with _noted(problems):
        if (
            datamodule is not None and facts["strategy"] != "fsdp"
        ):  # its weights are sharded over the processes
            batch = task.move_batch(datamodule.preview_batch(task.preview_images))
            save_pictures(folder, task.eval().preview(batch, datamodule))
            task.write_preview(folder / "preview", batch, datamodule)


def _write_summary(folder: Path, facts: Mapping[str, Any]) -> None:
    content = {**facts, "versions": _versions()}
    text = json.dumps(_valid_json(content), indent=2, allow_nan=False)
    write_whole(folder / SUMMARY, f"{text}\n")


@contextmanager
def _noted(problems: list[str]) -> Iterator[None]:
    """Collect the error of a file that cannot be written, and continue."""
    try:
        yield
    except OSError as error:
        problems.append(str(error))


def _valid_json(content: Any) -> Any:
    """Replace NaN and infinity by None, since JSON lacks them."""
    if isinstance(content, Mapping):
        return {key: _valid_json(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_valid_json(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def describe_left_out(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the row for data that an option excludes from evaluation, from a run's summary."""
    excluded = (facts.get("data") or {}).get("left_out")
    return {"left out of evaluation": excluded} if excluded and facts.get("metrics") else {}


def _trained(facts: Mapping[str, Any]) -> str:
    """Return the share of trained parameters, if some are frozen."""
    trained = facts.get("trained_parameters", facts["parameters"])
    if trained == facts["parameters"]:
        return ""
    return f", {_millions(trained)} trained"


def describe_cost(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the rows about size and speed from a run's summary."""
    size = " x ".join(map(str, facts["macs_at"]))
    backbone = _millions(facts["backbone_parameters"])
    table = {
        "parameters": f"{_millions(facts['parameters'])} (backbone {backbone}){_trained(facts)}",
        "backbone MACs": f"{facts['backbone_macs'] / 1e9:.3f} G at {size}",
    }
    if replaced := (facts.get("network") or {}).get("replaced"):
        table["replaced"] = replaced
    if facts.get("samples_per_second"):
        unit = find_family(facts["task"]).unit
        table["training"] = f"{facts['samples_per_second']:.3g} {unit}/s"
        table["waiting for data"] = describe_waiting(
            facts["waiting_for_data"], facts["num_workers"], facts.get("resident")
        )
    if facts.get("ended_by_time"):
        table["length"] = _describe_end(facts["ended_by_time"])
    seconds = facts["seconds"]
    return table | {"time": f"{seconds // 60:.0f} min {seconds % 60:.0f} s"}


def write_classes(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the metrics of each class, empty where undefined."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(file, text.getvalue())


def print_classes(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the metrics of each class."""
    first, *names = rows[0]
    records = [dict(row) for row in rows]
    kinds = {int: "{:,}", str: "{}"}
    forms = {name: kinds.get(type(rows[0][name]), "{:.4g}") for name in names}
    columns = {first: (first, "{}")} | {name: (name, form) for name, form in forms.items()}
    tables.write(records, "table", columns)


def compare_with_paper(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the values of the paper's row that a run reproduces, and the differences to ours."""
    paper = facts.get("paper")
    if not paper:
        return {}
    lines, family = {}, families().get(str(facts.get("task")))
    for name, figures in paper["metrics"].items():
        ours = figures["ours"]
        parts = [
            f"paper {figures['paper']:.4g}",
            "ours none" if ours is None else f"ours {ours:.4g}",
        ]
        if "difference" in figures:
            parts.append(f"difference {figures['difference']:+.2g}")
        lower = " (lower is better)" if family and family.direction(name) == "min" else ""
        lines[f"{paper['row']}, {name}{lower}"] = ", ".join(parts)
    if "why_not" in paper:
        lines["does not compare"] = paper["why_not"]
    return lines


def describe_waiting(share: float, workers: int, resident: bool | None = None) -> str:
    """Return the share of training in which the device waited for data.

    Args:
        share: Share of the time.
        workers: The option ``data.num_workers``.
        resident: The option ``data.resident``; None if the data lack it.

    Returns:
        The share, with what to type if it is high.
    """
    text = f"{share:.0%} of training"
    if share <= MUCH_WAITING or resident:
        return text
    text += f"; data.num_workers={max(2, 2 * workers)} may be faster (it was {workers})"
    return text if resident is None else f"{text}, or data.resident=true"


def save_pictures(folder: Path, pictures: list[Image.Image]) -> None:
    """Write preview/00.png, 01.png, ..."""
    target = make_folder(folder / "preview")
    for index, picture in enumerate(pictures):
        with whole_file(target / f"{index:02d}.png") as file:
            picture.save(file, "PNG")


def print_table(title: str, rows: Mapping[str, str], folder: Path) -> None:
    """Print the closing table and, last, the run folder's path."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    console = Console(width=None if Console().is_terminal else 100)
    console.print(table)
    print(f"Run folder: {_relative_path(folder)}")


def _millions(count: int) -> str:
    return f"{count / 1e6:.2f} M"


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _relative_path(folder: Path) -> Path:
    try:
        place = Path.cwd()
    except FileNotFoundError:  # it was removed
        return folder
    return folder.relative_to(place) if folder.is_relative_to(place) else folder
