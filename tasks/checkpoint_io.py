"""Checkpoints that survive a kill and a full disk, and hold nothing but tensors and values."""

from __future__ import annotations

import contextlib
import os
import pickle
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

TEMPORARY = ".partial"


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write beside the target, flush, and replace the target only when the file is whole.

    Lightning's own writer goes through the temporary folder: on another file system its move copies
    over the previous checkpoint, which a kill or a full disk then destroys.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Save, or leave the previous file as it is.

        Raises:
            OSError: The file cannot be written; names it.
        """
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        for stale in target.parent.glob(f"*{TEMPORARY}"):
            stale.unlink()
        temporary = target.with_name(target.name + TEMPORARY)
        try:
            with temporary.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
            _sync_folder(target.parent)
        except (OSError, RuntimeError) as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise OSError(
                f"the checkpoint {target} could not be written ({error}); the one before is kept"
            ) from error

    def load_checkpoint(
        self,
        path: Any,
        map_location: Any = "cpu",
        weights_only: bool | None = True,
    ) -> dict[str, Any]:
        """Load tensors and plain values; no code in a file is ever run.

        Raises:
            ValueError: No such file, or not a whole checkpoint of ours.
        """
        if not Path(path).is_file():
            raise ValueError(f"there is no checkpoint at {path}")
        try:
            content = torch.load(path, map_location=map_location, weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise ValueError(
                f"{path} is truncated or no checkpoint of tensors and values ({error})"
            ) from error
        return dict(content)


def _sync_folder(folder: Path) -> None:
    """Make the replaced name itself durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
