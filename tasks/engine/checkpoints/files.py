"""Checkpoints of tensors and plain values that survive a kill and a full disk."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_only

from backbones.checkpoints.opening import Checkpoint, UnreadableFile, open_checkpoint
from backbones.checkpoints.seal import DamagedCheckpoint, seal

# A separate logger, because runs silence Lightning's.
log_info = rank_zero_only(logging.getLogger(__name__).info)

TEMPORARY, SUFFIX = ".partial", ".ckpt"
BEST, LAST, PREVIOUS = "best.ckpt", "last.ckpt", "last.previous.ckpt"
# What the option ``checkpoints`` leaves of them in the folder of a finished run.
KEPT = {"all": (BEST, LAST), "best": (BEST,), "last": (LAST,)}


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write beside the target, flush, and replace the target only when the file is whole.

    Lightning's own writer goes through the temporary folder: on another file system its move copies
    over the previous checkpoint, which a kill or a full disk then destroys. The last checkpoint
    before this one stays too, should a file be damaged later.

    Args:
        folder: The run's folder of checkpoints; files elsewhere are never removed.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._held: Checkpoint | None = None

    def hold(self, checkpoint: Checkpoint) -> None:
        """Give this checkpoint when its file is next loaded, which then is not read again."""
        self._held = checkpoint

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Save, or leave the previous file as it is.

        Raises:
            OSError: The file cannot be written; names it.
        """
        self._held = None  # what was not asked for by now will not be
        target = Path(path)
        target.parent.mkdir(exist_ok=True)  # a run folder that was removed does not come back
        temporary = target.with_name(target.name + TEMPORARY)
        try:
            for stale in target.parent.glob(f"*{TEMPORARY}"):
                stale.unlink()
            with temporary.open("xb") as file:
                torch.save(seal(checkpoint), file)
                file.flush()
                os.fsync(file.fileno())
            if target.name == LAST and target.is_file():
                _keep(target, target.with_name(PREVIOUS))
            temporary.replace(target)
            _sync_folder(target.parent)
        except (OSError, RuntimeError) as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            state = "the one before is kept" if target.is_file() else "there is none before it"
            reason = str(error)
            if isinstance(error, OSError) and error.filename is not None:
                reason = f"{error.filename}: {error.strerror}"
            raise OSError(
                f"the checkpoint {target} could not be written ({reason}); {state}"
            ) from error

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint of this run's folder.

        Raises:
            ValueError: The path leads elsewhere, as paths in a checkpoint of others may.
        """
        file = Path(path)
        inside = self._folder is not None and file.parent.resolve() == self._folder.resolve()
        if not inside or not is_chosen(file.name):
            raise ValueError(
                f"{file} is not a best checkpoint in {self._folder} and stays; the checkpoint that "
                "the run was resumed from names it. Resume from another one, or start a new run"
            )
        file.unlink(missing_ok=True)

    def load_checkpoint(
        self,
        path: Any,
        map_location: Any = "cpu",
        weights_only: bool | None = True,
    ) -> dict[str, Any]:
        """Load tensors and plain values; no code in a file is ever run.

        Raises:
            ValueError: No such file, or one of a newer format.
            DamagedCheckpoint: Not a whole checkpoint of ours.
        """
        checkpoint, self._held = self._held, None
        if checkpoint is None or checkpoint.path != str(path):
            checkpoint = open_own(path, map_location)
        # Lightning's counters follow from the position; see ``ExactResume``.
        return {key: value for key, value in checkpoint.content.items() if key != "loops"}


def is_chosen(name: str) -> bool:
    """Return True for the name of a checkpoint that a metric chooses, such as the best one."""
    return name.endswith(SUFFIX) and name not in (LAST, PREVIOUS)


def keep_only(folder: Path, choice: str) -> None:
    """Remove what a finished run need not keep, once the file that stays was read back.

    Args:
        folder: Folder of its checkpoints.
        choice: One of ``KEPT``. The file that the closing evaluation has read is not read again.
    """
    if not (folder / LAST).is_file():
        return
    names = KEPT[choice]
    if not all((folder / name).is_file() for name in names):
        names = KEPT["all"]  # without validation there is only the last one
    if names == KEPT["all"]:
        try:
            open_own(folder / LAST)
        except ValueError as error:
            log_info(f"{error}. {PREVIOUS} stays")
            return
    for name in {BEST, LAST, PREVIOUS}.difference(names):
        (folder / name).unlink(missing_ok=True)


def open_own(path: Any, map_location: Any = "cpu") -> Checkpoint:
    """Open a checkpoint that a run of ours left, of which an earlier one may still be good.

    Raises:
        ValueError: No such file, or one of a newer format.
        DamagedCheckpoint: Not a whole checkpoint of ours.
    """
    try:
        checkpoint = open_checkpoint(path, map_location=map_location)
    except UnreadableFile as error:
        cause = error.__cause__ or error
        reason = str(cause).partition("\n")[0][:120] or type(cause).__name__
        raise _damaged(path, reason) from cause
    if not isinstance(checkpoint.content, dict):
        raise _damaged(path, f"it holds a {type(checkpoint.content).__name__}")
    return checkpoint


def _damaged(path: Any, reason: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(
        f"{path} is truncated or no checkpoint of tensors and values ({reason}); pass another "
        "checkpoint of the run, or copy it again"
    )


def _keep(target: Path, previous: Path) -> None:
    """Give a file a second name that outlives its first one."""
    previous.unlink(missing_ok=True)
    try:
        os.link(target, previous)
    except OSError:  # a file system without links: for a moment there is only the second name
        target.replace(previous)


def _sync_folder(folder: Path) -> None:
    """Make the replaced name itself durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
