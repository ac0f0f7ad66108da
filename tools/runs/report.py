"""What a run leaves beside its checkpoints: summary, curves, pictures, and the closing table."""

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
from tasks.engine.family import families, find_family
from tasks.engine.loggers import read_rows
from tasks.engine.plain_files import DamagedFile
from tasks.engine.whole_files import make_folder, whole_file, write_whole
from tools.cli import tables
from tools.cli.network_names import config_network_name
from tools.cli.processes import is_first_process
from tools.config.automatic import (
    batches_per_step,
    describe_choice,
    describe_rate,
    steps_per_epoch,
)
from tools.runs.curves import plot_curves

say = rank_zero_only(logging.getLogger(__name__).info)

SUMMARY, CLASSES = "summary.json", "classes.csv"
FINISHED = "finished"  # false in the summary of a run that a signal has stopped
MUCH_WAITING = 0.1  # of the time of training
PACKAGES = (
    "torch",
    "torchvision",
    "timm",
    "lightning",
    "torchmetrics",
    "onedl-mmdetection",
    "onedl-mmsegmentation",
)


def facts(config: Mapping[str, Any], model: Any, shape: tuple[int, ...]) -> dict[str, Any]:
    """What can be said about a run before it begins.

    That is its settings, the parameters of model and backbone, the backbone's multiply-adds at the
    training size, and what the network is besides its mixers.
    """
    return {
        "task": config["task_name"],
        "backbone": config_network_name(config["backbone"]),
        "mode": config["mode"],
        "checkpoint": config["ckpt"],
        "seed": config["seed"],
        "parameters": count_parameters(model),
        "pooling": None if model.backbone.dense else model.backbone.pooling,
        "backbone_parameters": count_parameters(model.backbone),
        "backbone_macs": count_macs(model.backbone, shape=shape),
        "macs_at": list(shape[1:]),
        "network": describe_network(model.backbone),
        "strategy": config["trainer"]["strategy"],
    }


def input_shape(config: Mapping[str, Any], datamodule: BaseDataModule) -> tuple[int, ...]:
    """Return the shape of a training input without its batch; images have it in their options."""
    return datamodule.input_shape or (3, *training_size(config["data"]))


def training_size(data: Mapping[str, Any]) -> tuple[int, int]:
    """Height and width that a config's ``data`` trains at, for images wider than high."""
    edges: Any = data.get("image_size") or data.get("scale") or data.get("scene_size")
    # crop_size is (height, width), scale (longest, shortest edge).
    size = data.get("crop_size") or (edges if isinstance(edges, int) else edges[::-1])
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def announce(
    known: Mapping[str, Any],
    config: Mapping[str, Any],
    datamodule: BaseDataModule,
    processes: int = 1,
) -> None:
    """Print what is about to be trained, and the learning rate with its derivation."""
    batch, trainer = config["data"]["batch_size"], config["trainer"]
    unit = find_family(config["task_name"]).unit
    epoch = datamodule.batches("train", processes)
    accumulated = batches_per_step(trainer, epoch)
    batches = f"{batch}"
    if processes > 1:
        parts = f"{processes} processes x {batch}"
        parts += f" x {accumulated} accumulated" if accumulated > 1 else ""
        batches = f"{processes * batch * accumulated} ({parts})"
    say(
        f"{known['task']} with {known['backbone']}: {_millions(known['parameters'])} parameters, "
        f"{len(datamodule.dataset('train'))} training {unit} in batches of {batches}, "
        f"{_length(trainer, epoch)}"
    )
    if accumulated < trainer["accumulate_grad_batches"]:
        say(
            f"A step has {accumulated} batches, all of an epoch, fewer than "
            f"trainer.accumulate_grad_batches={trainer['accumulate_grad_batches']}"
        )
    images = len(datamodule.dataset("train"))
    choice = describe_choice(config, images, steps_per_epoch(trainer, epoch))
    for line in filter(None, (choice, describe_rate(config, processes, accumulated))):
        say(line)


def announce_network(backbone: Backbone, options: Mapping[str, Any]) -> None:
    """Name what a network has otherwise than its plain host, such as a missing class token.

    Args:
        backbone: As built.
        options: The config's.
    """
    unlike = unlike_host(backbone, options)
    if unlike is not None:
        say(unlike)


def _length(trainer: Mapping[str, Any], batches: int) -> str:
    """How long a training lasts, in the unit that ends it first."""
    epochs, steps = trainer["max_epochs"], trainer["max_steps"]
    in_all = epochs * steps_per_epoch(trainer, batches)
    if steps >= 0 and (epochs < 0 or steps < in_all):
        return f"{steps} step{'s' * (steps != 1)}"
    return f"{epochs} epoch{'s' * (epochs != 1)}" if epochs >= 0 else "without end"


def say_finished(folder: Path) -> bool:
    """Whether a training run has come to its end; if so, say it."""
    from tasks.engine.run_files import read_summary

    try:
        summary = read_summary(folder / SUMMARY)
    except FileNotFoundError:
        return False
    except DamagedFile as error:
        say(f"{error}; the run goes on from its last checkpoint and rewrites it")
        return False
    if not is_finished(summary):
        return False
    metrics = summary["metrics"]
    shown = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
    say(f"The run is finished ({shown}), there is nothing to resume.\nRun folder: {_short(folder)}")
    return True


def reopen(folder: Path) -> None:
    """Let a finished run be one that trains again; its summary is written anew at the end."""
    if is_first_process():
        (folder / SUMMARY).unlink(missing_ok=True)


def write(
    folder: Path, known: Mapping[str, Any], task: BaseTask, datamodule: BaseDataModule
) -> None:
    """Write curves.png, preview/*.png and summary.json, and print the closing table.

    Raises:
        OSError: Names the files that could not be written; all others are there.
    """
    problems: list[str] = []
    _draw(folder, known, task, datamodule, problems)
    with _noted(problems):
        if task.class_figures:
            write_classes(folder, task.class_figures)
    with _noted(problems):
        # Written last: a run with a summary is finished.
        _write_summary(folder, known)
    table = {name: f"{value:.4g}" for name, value in known["metrics"].items()}
    table |= left_out(known) | beside_paper(known) | cost(known)
    if task.class_figures and known["mode"] != "fit":
        print_classes(task.class_figures)
    print_table(f"{known['task']}, {known['backbone']}, {known['mode']}", table, folder)
    if problems:
        raise OSError("; ".join(problems))


def write_stopped(
    folder: Path,
    known: Mapping[str, Any],
    trainer: Trainer,
    task: BaseTask,
    datamodule: BaseDataModule,
) -> None:
    """Write what a run has that a signal stopped; its summary says that it is not finished.

    Args:
        folder: Of the run.
        known: What is known of the run, with its seconds until now.
        trainer: Of the run.
        task: Of the run.
        datamodule: Of the run.
    """
    found = trainer.callback_metrics.items()
    figures = {name.partition("/")[2]: float(v) for name, v in found if name.startswith("val/")}
    stopped = {FINISHED: False, "step": trainer.global_step, "metrics": {}, "validation": figures}
    problems: list[str] = []
    with _noted(problems):
        _write_summary(folder, {**known, **stopped})
    average = task.ema if task.ema is not None and task.ema.is_reported else None
    with nullcontext() if average is None else average.applied_to(task.model):
        _draw(folder, known, task, datamodule, problems)
    say("\n".join([*problems, f"Run folder: {_short(folder)}"]))


def is_finished(summary: Mapping[str, Any]) -> bool:
    """Return True for the summary of a run that has come to its end."""
    return summary.get(FINISHED) is not False


def _draw(
    folder: Path,
    known: Mapping[str, Any],
    task: BaseTask,
    datamodule: BaseDataModule,
    problems: list[str],
) -> None:
    """Write the curves of a training and the pictures."""
    with _noted(problems):
        if known["mode"] == "fit":
            plot_curves(folder, read_rows(folder / "metrics.csv"), task.why_no_loss)
    with _noted(problems):
        if known["strategy"] != "fsdp":  # with it no process holds all weights
            save_pictures(folder, _pictures(task, datamodule))


def _write_summary(folder: Path, known: Mapping[str, Any]) -> None:
    content = {**known, "versions": _versions()}
    text = json.dumps(_valid_json(content), indent=2, allow_nan=False)
    write_whole(folder / SUMMARY, f"{text}\n")


@contextmanager
def _noted(problems: list[str]) -> Iterator[None]:
    """Go on where a file cannot be written, and note it."""
    try:
        yield
    except OSError as error:
        problems.append(str(error))


def _valid_json(content: Any) -> Any:
    """Return a content with null for NaN and infinity, which JSON does not have."""
    if isinstance(content, Mapping):
        return {key: _valid_json(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_valid_json(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def left_out(known: Mapping[str, Any]) -> dict[str, str]:
    """What an option leaves out of a run's evaluation, in words; of what its summary says."""
    words = (known.get("data") or {}).get("left_out")
    return {"left out of evaluation": words} if words and known.get("metrics") else {}


def cost(known: Mapping[str, Any]) -> dict[str, str]:
    """How large and fast a run was, in words; of what its summary says."""
    size = " x ".join(map(str, known["macs_at"]))
    backbone = _millions(known["backbone_parameters"])
    table = {
        "parameters": f"{_millions(known['parameters'])} (backbone {backbone})",
        "backbone MACs": f"{known['backbone_macs'] / 1e9:.3f} G at {size}",
    }
    if known.get("images_per_second"):
        unit = find_family(known["task"]).unit
        table["training"] = f"{known['images_per_second']:.3g} {unit}/s"
        table["waiting for data"] = waiting(known["waiting_for_data"], known["num_workers"])
    seconds = known["seconds"]
    return table | {"time": f"{seconds // 60:.0f} min {seconds % 60:.0f} s"}


def write_classes(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write classes.csv: the metrics of each class, empty where there is nothing to measure."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(folder / CLASSES, text.getvalue())


def print_classes(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the metrics of each class."""
    first, *others = rows[0]
    records = [dict(row) for row in rows]
    forms = {name: "{:,}" if isinstance(rows[0][name], int) else "{:.4g}" for name in others}
    columns = {first: (first, "{}")} | {name: (name, form) for name, form in forms.items()}
    tables.write(records, "table", columns)


def beside_paper(known: Mapping[str, Any]) -> dict[str, str]:
    """Of a run that claims to be a row of a paper: the row's values, and how far ours are off."""
    paper = known.get("paper")
    if not paper:
        return {}
    shown, family = {}, families().get(str(known.get("task")))
    for name, figures in paper["metrics"].items():
        ours = figures["ours"]
        words = [
            f"paper {figures['paper']:.4g}",
            "ours none" if ours is None else f"ours {ours:.4g}",
        ]
        if "difference" in figures:
            words.append(f"difference {figures['difference']:+.2g}")
        lower = " (lower is better)" if family and family.direction(name) == "min" else ""
        shown[f"{paper['row']}, {name}{lower}"] = ", ".join(words)
    if "why_not" in paper:
        shown["does not compare"] = paper["why_not"]
    return shown


def waiting(share: float, workers: int) -> str:
    """The share of training that waits for data, and what to change where it is high."""
    text = f"{share:.0%} of training"
    if share <= MUCH_WAITING:
        return text
    return f"{text}; data.num_workers={max(2, 2 * workers)} may be faster (it was {workers})"


def _pictures(task: BaseTask, datamodule: BaseDataModule) -> list[Image.Image]:
    """Pictures of images spread over what prediction would see."""
    return task.eval().preview(datamodule.preview_batch(task.preview_images), datamodule)


def save_pictures(folder: Path, pictures: list[Image.Image]) -> None:
    """Write preview/00.png, 01.png, ..."""
    target = make_folder(folder / "preview")
    for index, picture in enumerate(pictures):
        with whole_file(target / f"{index:02d}.png") as file:
            picture.save(file, "PNG")


def print_table(title: str, rows: Mapping[str, str], folder: Path) -> None:
    """Print the closing table and, last of all, the run folder's path."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    console = Console(width=None if Console().is_terminal else 100)
    console.print(table)
    print(f"Run folder: {_short(folder)}")


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


def _short(folder: Path) -> Path:
    try:
        here = Path.cwd()
    except FileNotFoundError:  # it was removed
        return folder
    return folder.relative_to(here) if folder.is_relative_to(here) else folder
