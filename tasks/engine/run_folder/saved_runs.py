"""Resolve a path to its checkpoint and run folder."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backbones.checkpoints.folders import find_weights
from tasks.engine.run_folder.bounded_reading import DamagedFile
from tasks.engine.run_folder.schemas import read_run_config
from tasks.engine.run_folder.source_copies import check_sources

if TYPE_CHECKING:
    from backbones.checkpoints.opening import Checkpoint

CONFIG = "config.yaml"
SOLVED = "heads.frozen."  # heads that are solved from features, without a checkpoint
CHECKPOINTS = "checkpoints"
# Keys that identify the parts of a config which decide how a checkpoint is used.
IDENTITY = {
    "backbone": ("name",),
    "head": ("_target_", "name"),
    "data": ("_target_",),
    "task": ("_target_",),
}


@dataclass(frozen=True)
class SavedRun:
    """A training run on disk.

    Attributes:
        folder: Run folder.
        checkpoint: One of its checkpoints.
        config: Config of the run, as plain values.
    """

    folder: Path
    checkpoint: Path
    config: dict[str, Any]


@dataclass(frozen=True)
class Saved:
    """A checkpoint file, and the run that it belongs to.

    Attributes:
        file: The checkpoint file.
        run: The run that it belongs to; None for a file on its own.
    """

    file: Path
    run: SavedRun | None

    @functools.cached_property
    def checkpoint(self) -> Checkpoint:
        """Return the content of the file, read once."""
        from backbones.checkpoints.opening import open_checkpoint

        return open_checkpoint(self.file)


def checkpoint_file(path: str | Path, name: str = "best.ckpt") -> Path:
    """Return the checkpoint of a path: a file, or the one in the folder of a run or other tool.

    For a run with ``checkpoints=last`` it is the last checkpoint.

    Raises:
        ValueError: The path does not exist, or the folder has several checkpoints or lacks one.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        inside = path / CHECKPOINTS / name
        if not inside.is_file() and _keeps_last(path):
            inside = inside.with_name("last.ckpt")
        if inside.is_file():
            return inside
        weights = None if (path / CONFIG).is_file() else find_weights(path)
        if weights is None:
            raise ValueError(_without_checkpoint(path, inside))
        return weights
    if not path.is_file():
        raise ValueError(f"{path} does not exist; pass a checkpoint or run folder")
    return path


def open_saved(path: str | Path) -> Saved:
    """Find the checkpoint of a run folder or file, and the run that it belongs to.

    All commands open ``ckpt=`` by this function.

    Raises:
        ValueError: The path does not exist, the folder's config is not one of a run, or this
            checkout lacks the run's host or mixer.
    """
    checkpoint = checkpoint_file(path)
    # Links lead to folders (latest), and to checkpoints from elsewhere.
    for file in (checkpoint.absolute(), checkpoint.resolve()):
        folder = file.parent.parent
        if file.parent.name == CHECKPOINTS and (folder / CONFIG).exists():
            config = read_config(folder / CONFIG)
            check_sources(folder.resolve(), config["backbone"])
            return Saved(checkpoint, SavedRun(folder.resolve(), checkpoint, config))
    return Saved(checkpoint, None)


def read_config(file: Path) -> dict[str, Any]:
    """Read the config of a run as plain values.

    Raises:
        ValueError: The file is not YAML of plain values, or does not fit the schema.
    """
    try:
        return read_run_config(file)
    except (FileNotFoundError, DamagedFile) as error:
        raise ValueError(
            f"{error}; restore it, or copy the checkpoint to another folder and type task, "
            "backbone, head and data beside it"
        ) from error


def identity(group: str, part: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the values that identify a backbone, head, dataset or task of a config."""
    return tuple(part.get(key) for key in IDENTITY[group])


def _keeps_last(folder: Path) -> bool:
    """Return True for the folder of a run that keeps its last checkpoint only."""
    try:
        return read_config(folder / CONFIG).get("checkpoints") == "last"
    except ValueError:
        return False


def _without_checkpoint(folder: Path, inside: Path) -> str:
    """Describe a folder that lacks the checkpoint ``inside``."""
    text = f"{folder} is not a run folder with a checkpoint: {inside} is missing"
    try:
        config = read_config(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    except ValueError:
        return text
    if config.get("mode", "fit") != "fit":
        return (
            f"{folder} belongs to an evaluation (mode={config['mode']}), which saves no weights; "
            f"pass the run that it evaluated: ckpt={config.get('ckpt')}"
        )
    if str(config.get("head", {}).get("_target_")).startswith(SOLVED):
        return (
            f"{folder} is a run of protocol={config.get('protocol')}, which saves no weights; its "
            "figures are in summary.json. To repeat them, pass the same protocol and "
            "backbone.pretrained=<checkpoint>"
        )
    return text
