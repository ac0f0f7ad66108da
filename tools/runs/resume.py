"""The checkpoint to resume from: the newest good one of a run folder, or a named one."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_only

from backbones.checkpoints.opening import Checkpoint
from backbones.checkpoints.seal import DamagedCheckpoint
from tasks.engine.base import BaseTask
from tasks.engine.checkpoints.data_position import Position
from tasks.engine.checkpoints.exact_resume import CHECKPOINTS, ExactResume
from tasks.engine.checkpoints.files import LAST, PREVIOUS, open_own

log_info = rank_zero_only(logging.getLogger(__name__).info)


@dataclass
class Start:
    """A checked checkpoint to resume from."""

    path: Path
    position: Position
    checkpoint: Checkpoint | None

    def take(self) -> Checkpoint:
        """Return the content of the file once, to free its memory before training."""
        checkpoint, self.checkpoint = self.checkpoint, None
        assert checkpoint is not None, "taken already"
        return checkpoint


def find_start(folder: Path, ckpt: str | None, task: BaseTask, trainer: Mapping[str, Any]) -> Start:
    """Find the checkpoint to resume from.

    Args:
        folder: Run folder.
        ckpt: A file, which is then the one; else the newest good one of the folder is.
        task: It must hold the weights of this task's model.
        trainer: The options of the trainer; the run must not be meant to have ended before it.

    Raises:
        ValueError: No checkpoint is there, or it is of another run.
    """
    from tasks.engine.checkpoints.resume_checks import check_continues

    file = None if ckpt is None else Path(ckpt).expanduser()
    files = [file] if file is not None and file.is_file() else _last_ones(folder)
    path, checkpoint = _first_good(files, folder)
    position = ExactResume.position(checkpoint.values)
    task.check_targets(checkpoint)
    check_continues(checkpoint, task, sharded=trainer["strategy"] == "fsdp")
    _refuse_shorter(position, trainer)
    return Start(path, position, checkpoint)


def log_start(start: Start, new_length: str | None) -> None:
    """Log where a run continues, and that its schedule follows a new length.

    Args:
        start: The checkpoint.
        new_length: From ``folder.describe_new_length``.
    """
    log_info(f"Going on after step {start.position.step}, from {start.path.name}")
    if new_length:
        log_info(f"{new_length}: from here on the learning rate is that of a run of the new length")


def _last_ones(folder: Path) -> list[Path]:
    """Return last.ckpt and the one before it, which alone can be resumed from."""
    files = (folder / CHECKPOINTS / name for name in (LAST, PREVIOUS))
    return [path for path in files if path.is_file()]


def _first_good(files: list[Path], folder: Path) -> tuple[Path, Checkpoint]:
    damage: DamagedCheckpoint | None = None
    for path in files:
        try:
            checkpoint = open_own(path)
        except DamagedCheckpoint as error:
            damage = damage or error
            continue
        if damage is not None:
            log_info(f"{damage}; the run continues from {path.name}, step {checkpoint.step}")
        return path, checkpoint
    raise damage or ValueError(
        f"{folder / CHECKPOINTS} has neither {LAST} nor {PREVIOUS}, and other checkpoints hold "
        "weights only and cannot be resumed; start a new run, with backbone.pretrained=<this run> "
        "from its weights"
    )


def _refuse_shorter(position: Position, trainer: Mapping[str, Any]) -> None:
    begun = position.epoch + (position.batch > 0)
    for name, count, unit in (
        ("max_epochs", begun, "epoch"),
        ("max_steps", position.step, "step"),
    ):
        if 0 <= trainer[name] < count:
            raise ValueError(
                f"trainer.{name}={trainer[name]}, but the run to resume is in or past {unit} "
                f"{count} already; pass at least {count}, or test it as it is with mode=test"
            )
