"""Resolve a path to its checkpoint and run folder."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backbones.checkpoints import hub
from backbones.checkpoints.folders import find_weights
from backbones.checkpoints.hub import is_model_source, open_model_folder, read_entries
from tasks.engine.run_folder.bounded_reading import DamagedFile
from tasks.engine.run_folder.schemas import check_run_config, read_run_config
from tasks.engine.run_folder.source_copies import check_sources

if TYPE_CHECKING:
    from backbones.checkpoints.opening import Checkpoint

CONFIG, HUB_CONFIG = "config.yaml", hub.CONFIG
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

    For a run with ``checkpoints=last`` it is the last checkpoint. The path may be the source of a
    model folder, ``hf-hub:...`` or ``local-dir:...``.

    Raises:
        ValueError: The path does not exist, or the folder has several checkpoints or lacks one.
    """
    if is_model_source(path):
        return open_model_folder(str(path)).weights
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
    entries = read_entries(checkpoint)
    if not entries:
        return Saved(checkpoint, None)
    config = check_run_config(checkpoint.with_name(HUB_CONFIG), entries.get("config"))
    config.setdefault("seed", 0)
    check_strangers(config, checkpoint)
    return Saved(checkpoint, SavedRun(checkpoint.parent, checkpoint, config))


def lasting_path(path: str) -> str:
    """Return a checkpoint's path that means the same file from any folder and at any time.

    "latest" may point to another run later, and a revision of the hub to another commit.
    """
    if is_model_source(path):
        return open_model_folder(path).source
    return str(checkpoint_file(path).resolve())


def file_options(config: Mapping[str, Any]) -> list[str]:
    """Return the options of a config whose values look like files, such as ``data.root``."""
    groups = ("backbone", "head", "task", "data")
    return [name for group in groups for name in _file_options(config.get(group), group)]


def _file_options(value: Any, name: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _file_options(item, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _file_options(item, name)
    elif isinstance(value, str) and (value.startswith("~") or "/" in value or "\\" in value):
        yield name


def check_strangers(config: Mapping[str, Any], weights: Path) -> None:
    """Refuse files that the config of a model folder names: they would be read here.

    Raises:
        ValueError: Names the option.
    """
    names = file_options(config)
    if names:
        raise ValueError(
            f"{weights.with_name(HUB_CONFIG)} names a file in {names[0]}; the config of a model "
            "folder names none"
        )


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
