"""Find run folders and read them, whatever state they are in."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tasks.engine.run_folder.bounded_reading import DamagedFile
from tasks.engine.run_folder.saved_runs import CONFIG
from tasks.engine.run_folder.schemas import read_rows, read_run_config, read_summary
from tools.cli.catalogue import catalogue
from tools.cli.nested_config import flatten
from tools.runs.default_values import comparable_config
from tools.runs.outcome import read_failure

ENDLESS = 1e30  # sums of larger figures may overflow
SUMMARY, METRICS = "summary.json", "metrics.csv"
Status = Literal["finished", "evaluation", "unfinished", "failed", "unreadable"]


@dataclass(frozen=True)
class RunRecord:
    """Content of a run folder.

    Attributes:
        folder: Its resolved path.
        status: Only finished runs have comparable figures.
        reason: Progress or problem of the run, for messages.
        config: Settings by dotted name.
        summary: For a finished run, the content of summary.json.
        metrics: For a finished run, its final metrics.
    """

    folder: Path
    status: Status
    reason: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def task(self) -> str:
        """Return the name of the task."""
        return str(self.config["task_name"])

    @property
    def host(self) -> str | None:
        """Return the host of its backbone, or None if this checkout lacks the backbone."""
        registered = catalogue()  # broken files in backbones raise
        try:
            return registered.host_of(self.config["backbone.name"])
        except ValueError:
            return None


def find_runs(places: Sequence[str]) -> list[Path]:
    """Find run folders in and below folders and patterns; each once, sorted by name.

    Links to folders, such as ``latest``, are followed only if they are named.

    Raises:
        ValueError: A place does not exist, or none has a run.
    """
    folders: dict[Path, None] = {}
    for place in places:
        path = Path(place).expanduser()
        matches = [path] if path.exists() else sorted(Path(path.anchor).glob(_relative(path)))
        if not matches:
            raise ValueError(
                f"{place} does not exist; pass run folders, folders that contain them, or patterns "
                "such as 'outputs/detection/swin_*'"
            )
        for path in matches:
            folders |= dict.fromkeys(_below(path))
    if not folders:
        raise ValueError(f"{', '.join(places)}: no run folder found (a {CONFIG} is missing)")
    return sorted(folders)


def _relative(path: Path) -> str:
    return str(path.relative_to(path.anchor)) if path.anchor else str(path)


def _below(path: Path) -> list[Path]:
    if path.is_dir() and _is_run([inside.name for inside in path.iterdir()]):
        return [path.resolve()]
    folders = []
    for folder, names, files in os.walk(path):
        if _is_run(files):
            folders.append(Path(folder).resolve())
            names.clear()
    return folders


def _is_run(files: Sequence[str]) -> bool:
    return CONFIG in files or SUMMARY in files


def read_run(folder: Path) -> RunRecord:
    """Read a run folder; problems become its status and never raise."""
    config: dict[str, Any] = {}
    try:
        config = {"mode": "fit", "seed": 0} | comparable_config(
            flatten(read_run_config(folder / CONFIG))
        )
        if not (folder / SUMMARY).exists():
            return _unfinished(folder, config)
        summary = read_summary(folder / SUMMARY)
        if summary.get("finished") is False:
            return _unfinished(folder, config)
    except FileNotFoundError as error:
        return RunRecord(folder, "unreadable", f"{Path(error.filename).name} is missing", config)
    except DamagedFile as error:
        reason = str(error).replace(f"{folder}/", "")
        return RunRecord(folder, "unreadable", reason, config)
    metrics = summary["metrics"]
    if config["mode"] != "fit":
        return RunRecord(folder, "evaluation", f"mode={config['mode']}", config, summary, metrics)
    figures = {name: summary[name] for name in ("parameters", "backbone_macs", "seconds")}
    wrong = [name for name, value in (metrics | figures).items() if not abs(value) < ENDLESS]
    if wrong or not metrics:
        note = f"{', '.join(wrong)} must be a finite number" if wrong else "no metric was evaluated"
        return RunRecord(folder, "failed", note, config, summary, metrics)
    return RunRecord(folder, "finished", "", config, summary, metrics)


def _unfinished(folder: Path, config: Mapping[str, Any]) -> RunRecord:
    """Return the record of a run that failed or was interrupted."""
    failure = read_failure(folder)
    if failure is not None:
        return RunRecord(folder, "failed", failure, config)
    return RunRecord(folder, "unfinished", _progress(folder, config), config)


def _progress(folder: Path, config: Mapping[str, Any]) -> str:
    """Return the progress of a run without summary, from the last complete line of metrics.csv."""
    if not (folder / METRICS).exists():
        return "nothing was logged"
    rows = read_rows(folder / METRICS)
    if not rows:
        return f"{METRICS} lacks a complete line"
    epoch = rows[-1].get("epoch")
    words = f"logged last at step {rows[-1]['step']}"
    if epoch is None or not math.isfinite(epoch):
        return words
    epochs = config.get("trainer.max_epochs")
    # The evaluation after the last epoch logs the number of epochs.
    number = int(epoch) + 1 if not epochs or epochs < 0 else min(int(epoch) + 1, epochs)
    return f"{words}, epoch {number} of {epochs}"
