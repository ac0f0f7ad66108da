"""A note in the run folder tells a failed run from an interrupted one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tasks.engine.run_folder.bounded_reading import read_text
from tasks.engine.run_folder.run_config import RunConfig
from tools.cli.errors import is_gpu_memory, user_message
from tools.cli.printable import printable

FAILURE = "error.txt"


@contextlib.contextmanager
def recording_failure(folder: Path) -> Iterator[None]:
    """Write the message of an error into the run folder; a signal writes none.

    The note of an earlier attempt is removed.
    """
    note = folder / FAILURE
    with contextlib.suppress(OSError):
        note.unlink(missing_ok=True)
    try:
        yield
    except Exception as error:
        record_failure(folder, user_message(error) or str(error) or type(error).__name__)
        raise


@contextlib.contextmanager
def explaining_full_memory(config: RunConfig, folder: Path) -> Iterator[None]:
    """Replace the error of a full GPU by one that names the batch and a smaller one.

    Raises:
        ValueError: The GPU's memory is full.
    """
    try:
        yield
    except Exception as error:
        if not is_gpu_memory(error):
            raise
        raise ValueError(_smaller_batch(config, folder)) from error


def _smaller_batch(config: RunConfig, folder: Path) -> str:
    from tasks.engine.checkpoints.files import LAST  # imports torch

    data, accumulated = config.data, config.trainer["accumulate_grad_batches"]
    if config.mode != "fit":
        size = data.get("eval_batch_size") or data["batch_size"]
        return (
            f"the GPU's memory is full with data.eval_batch_size={size}; pass a smaller one, or "
            "trainer.devices=[<another GPU>]"
        )
    size = data["batch_size"]
    text = (
        f"the GPU's memory is full with data.batch_size={size} and "
        f"trainer.accumulate_grad_batches={accumulated}; pass "
    )
    if size > 1:
        text += (
            f"data.batch_size={size // 2} trainer.accumulate_grad_batches={2 * accumulated} for a "
            "step of as many examples, or "
        )
    text += "backbone.grad_checkpointing=true"
    if (folder / "checkpoints" / LAST).is_file():
        text += f"; resume=true ckpt={folder} continues from the last checkpoint"
    return text


def record_failure(folder: Path, text: str) -> None:
    """Write the note of a failure, unless another process was first."""
    # Where nothing can be written, a full disk may be the error itself.
    with (
        contextlib.suppress(OSError),
        (folder / FAILURE).open("x", encoding="utf-8", errors="backslashreplace") as note,
    ):
        note.write(f"{text}\n")


def read_failure(folder: Path) -> str | None:
    """Return the first line of the note, or None without a note.

    Raises:
        DamagedFile: It cannot be read.
    """
    try:
        text = read_text(folder / FAILURE, errors="replace").strip().partition("\n")[0]
    except FileNotFoundError:
        return None
    return printable(text, 1_000) or "failed"
