"""Prediction from Python: inputs of any number, one batch at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tasks.engine.batches import UNREADABLE, Batch, Row
from tasks.engine.callbacks.ema import reported
from tasks.engine.run_folder.predictions import OutputFiles, SavedRows, saved_rows

if TYPE_CHECKING:
    from tasks.engine.base import BaseTask

logger = logging.getLogger(__name__)

Describe = Callable[[Batch, Any], "list[Row]"]


def serving(task: BaseTask, inputs: Any, batch_size: int | None, num_workers: int) -> Any:
    """Return a datamodule that serves these inputs, a copy of the task's.

    Raises:
        ValueError: A number is out of range.
    """
    if task.data is None:
        from tasks.engine.loading import usual_datamodule

        task.data = usual_datamodule(task)
    if (batch_size is not None and batch_size < 1) or num_workers < 0:
        raise ValueError(
            f"batch_size must be at least 1 and num_workers at least 0; got {batch_size} and "
            f"{num_workers}"
        )
    data = task.data.with_predict_inputs(inputs)
    data.num_workers = num_workers
    if batch_size is not None:
        data.eval_batch_size = batch_size
    return data


def predicted_rows(task: BaseTask, data: Any, describe: Describe) -> Iterator[Row]:
    """Yield a row per input, with ``UNREADABLE`` and the reason for a broken file."""
    task.eval()
    for batch in data.predict_dataloader():
        broken = batch.pop(UNREADABLE, ())
        rows: list[Row] = []
        if batch:
            # Swapped in per batch, so that a caller who stops early leaves the weights as they are.
            with reported(task.ema, task.model), torch.no_grad():
                rows = describe(data.normalise(task.move_batch(batch)), data)
        yield from rows
        yield from ({"input": sample.name, UNREADABLE: sample.reason} for sample in broken)


def stream(task: BaseTask, data: Any) -> Iterator[Row]:
    """Yield a row per readable input, and warn of each other one; see ``BaseTask.stream``.

    Raises:
        ValueError: No input can be read.
    """
    broken, is_empty = "", True
    for row in predicted_rows(task, data, task.describe):
        if UNREADABLE in row:
            broken = broken or row[UNREADABLE]
            logger.warning("%s; it is left out", row[UNREADABLE])
        else:
            is_empty = False
            yield row
    if broken and is_empty:
        raise ValueError(broken)


def predict_all(task: BaseTask, data: Any) -> list[Row]:
    """Return a row per input; see ``BaseTask.predict``.

    Raises:
        ValueError: Names an input that cannot be read.
    """
    rows = []
    for row in predicted_rows(task, data, task.describe):
        if UNREADABLE in row:
            raise ValueError(row[UNREADABLE])
        rows.append(row)
    return rows


def predict_to(task: BaseTask, data: Any, folder: Path) -> SavedRows:
    """Write predictions to a folder, input by input; see ``BaseTask.predict``.

    Raises:
        ValueError: No input can be read.
        OSError: A file cannot be written.
    """
    files = OutputFiles(folder, data.predict_names())
    saved, broken = SavedRows(folder, 0), []
    with saved_rows(folder) as add:
        for row in predicted_rows(
            task, data, lambda batch, _: task.describe_to(batch, data, files)
        ):
            if UNREADABLE in row:
                broken.append(row[UNREADABLE])
            else:
                saved = add(row)
    if broken and not saved:
        raise ValueError(broken[0])
    if broken:
        logger.warning(
            "%d of %d %s cannot be read and are left out: %s",
            len(broken), len(broken) + len(saved), task.family.unit, broken[0],
        )  # fmt: skip
    task.write_results(folder, saved)
    return saved
