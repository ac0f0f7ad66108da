"""What a run leaves beside its checkpoints: summary, curves, pictures, and the closing table."""

from __future__ import annotations

import csv
import importlib.metadata
import json
import logging
import math
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_only
from PIL import Image

from backbones.analysis.counting import count_macs, count_parameters
from backbones.analysis.description import describe_network, unlike_host
from backbones.base import Backbone
from datamodules import BaseDataModule
from tasks.base import BaseTask
from tasks.loggers import read_rows
from tasks.plain_files import DamagedFile
from tools.command_line import tables
from tools.command_line.network_names import name_of
from tools.running.automatic import describe_choice, describe_rate, steps_per_epoch
from tools.running.curves import plot_curves
from tools.running.processes import is_first_process

say = rank_zero_only(logging.getLogger(__name__).info)

SUMMARY, CLASSES = "summary.json", "classes.csv"
ROOT = Path(__file__).resolve().parents[2]
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


def facts(config: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """What can be said about a run before it begins.

    That is its settings, the parameters of model and backbone, the backbone's multiply-adds at the
    training size, and what the network is besides its mixers.
    """
    height, width = training_size(config["data"])
    return {
        "task": config["task_name"],
        "backbone": name_of(config["backbone"]),
        "mode": config["mode"],
        "checkpoint": config["ckpt"],
        "seed": config["seed"],
        "parameters": count_parameters(model),
        "pooling": None if model.backbone.dense else model.backbone.pooling,
        "backbone_parameters": count_parameters(model.backbone),
        "backbone_macs": count_macs(model.backbone, (height, width)),
        "macs_at": [height, width],
        "network": describe_network(model.backbone),
        "strategy": config["trainer"]["strategy"],
    }


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
    batch = config["data"]["batch_size"]
    accumulated = config["trainer"]["accumulate_grad_batches"]
    batches = f"{batch}"
    if processes > 1:
        parts = f"{processes} processes x {batch}"
        parts += f" x {accumulated} accumulated" if accumulated > 1 else ""
        batches = f"{processes * batch * accumulated} ({parts})"
    say(
        f"{known['task']} with {known['backbone']}: {_millions(known['parameters'])} parameters, "
        f"{len(datamodule.dataset('train'))} training images in batches of {batches}, "
        f"{_length(config['trainer'], datamodule.batches('train', processes))}"
    )
    per_epoch = steps_per_epoch(config["trainer"], datamodule.batches("train", processes))
    images = len(datamodule.dataset("train"))
    lines = (describe_choice(config, images, per_epoch), describe_rate(config, processes))
    for line in filter(None, lines):
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
    from tasks.run_files import read_summary

    try:
        metrics = read_summary(folder / SUMMARY)["metrics"]
    except FileNotFoundError:
        return False
    except DamagedFile as error:
        say(f"{error}; the run goes on from its last checkpoint and rewrites it")
        return False
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
    """Write curves.png, preview/*.png and summary.json, and print the closing table."""
    if known["mode"] == "fit":
        best = folder / "checkpoints" / "best.ckpt"
        known = {**known, "checkpoint": "checkpoints/best.ckpt" if best.is_file() else None}
        plot_curves(folder, read_rows(folder / "metrics.csv"), task.why_no_loss)
    if known["strategy"] != "fsdp":  # with it no process holds all weights
        save_pictures(folder, _pictures(task, datamodule))
    if task.class_figures:
        write_classes(folder, task.class_figures)
    # Written last: a run with a summary is finished.
    content = {**known, "versions": _versions(), "git_commit": _git_commit()}
    text = json.dumps(_valid_json(content), indent=2, allow_nan=False)
    (folder / SUMMARY).write_text(f"{text}\n")
    table = {name: f"{value:.4g}" for name, value in known["metrics"].items()}
    table |= left_out(known) | beside_paper(known) | cost(known)
    if task.class_figures and known["mode"] != "fit":
        print_classes(task.class_figures)
    print_table(f"{known['task']}, {known['backbone']}, {known['mode']}", table, folder)


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
        table["training"] = f"{known['images_per_second']:.3g} images/s"
        table["waiting for data"] = waiting(known["waiting_for_data"], known["num_workers"])
    seconds = known["seconds"]
    return table | {"time": f"{seconds // 60:.0f} min {seconds % 60:.0f} s"}


def write_classes(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write classes.csv: the metrics of each class, empty where there is nothing to measure."""
    with (folder / CLASSES).open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


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
    shown = {}
    for name, figures in paper["metrics"].items():
        ours = figures["ours"]
        words = [
            f"paper {figures['paper']:.4g}",
            "ours none" if ours is None else f"ours {ours:.4g}",
        ]
        if "difference" in figures:
            words.append(f"difference {figures['difference']:+.2g}")
        lower = " (lower is better)" if name == "mce" else ""
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
    target = folder / "preview"
    target.mkdir(exist_ok=True)
    for index, picture in enumerate(pictures):
        picture.save(target / f"{index:02d}.png")


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


def _git_commit() -> str | None:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _short(folder: Path) -> Path:
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
