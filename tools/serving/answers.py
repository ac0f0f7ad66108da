"""Answers of a trained network for one input of a client, as plain values and pictures."""

from __future__ import annotations

import base64
import copy
import io
import math
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from tasks.engine.base import BaseTask
from tasks.engine.batches import UNREADABLE, Batch, Row
from tasks.engine.predicting import predicted_rows, serving
from tasks.engine.run_folder.predictions import OutputFiles

CAM = "cam"  # the analysis that shows where a network looked
MOST_LINES = 32  # of a typed text, each of which is an input


@dataclass(frozen=True)
class Question:
    """An input of a client.

    Attributes:
        content: Bytes of the file, or the typed text.
        name: Name of the file at the client.
        threshold: Of the answer's lines and pictures; None for the run's.
        draws: True to draw the answer.
        explains: True to show where the network looked.
    """

    content: bytes
    name: str = "input"
    threshold: float | None = None
    draws: bool = True
    explains: bool = False


def describe(task: BaseTask, label: str) -> dict[str, Any]:
    """Return what the page shows of a network before its first answer."""
    return {
        "label": label,
        "task": task.family.name,
        "prompt": task.family.prompt,
        "unit": task.family.unit,
        "threshold": getattr(task, "threshold", None),
        "explains": can_explain(task),
        "classes": list(getattr(task, "class_names", ())),
    }


def can_explain(task: BaseTask) -> bool:
    """Return True if class activation maps apply to the network."""
    analyses = task.family.analyses
    return "evidence" in analyses and task.family.analysis(CAM) is not None


def answer(task: BaseTask, question: Question, most_pixels: int) -> dict[str, Any]:
    """Return the lines, the values, the files and the pictures of an answer.

    Args:
        task: From ``tasks.load``; stays as it is.
        question: Of a client.
        most_pixels: Largest image.

    Raises:
        ValueError: The input is broken or too large.
    """
    task = _with_threshold(task, question.threshold)
    with tempfile.TemporaryDirectory(prefix="mixerlab-serve-") as folder:
        try:
            return _answer(task, question, Path(folder), most_pixels)
        except (ValueError, OSError) as error:
            reason = str(error).replace(str(_file(question, Path(folder))), _shown_name(question))
            raise ValueError(reason.replace(folder, "")) from error


def _answer(task: BaseTask, question: Question, folder: Path, most_pixels: int) -> dict[str, Any]:
    if task.family.prompt:
        inputs: Any = _lines(question.content)
    else:
        inputs = _file(question, folder)
        inputs.write_bytes(question.content)
        _check_pixels(inputs, most_pixels)
    data = serving(task, inputs, 1, 0)
    files, pictures = OutputFiles(folder / "files", data.predict_names()), []

    def rows_of(batch: Batch, _: Any) -> list[Row]:
        if question.draws:
            pictures.extend(task.preview(copy.copy(batch), data))
        return task.describe_to(batch, data, files)

    rows = list(predicted_rows(task, data, rows_of))
    for row in rows:
        if UNREADABLE in row:
            raise ValueError(row[UNREADABLE])
    lines = [task.answer(row) for row in rows]
    result = {
        "answer": "\n".join(lines),
        "rows": [json_value({**row, "input": _shown_name(question)}) for row in rows],
        "files": {
            files.relative(file): base64.b64encode(file.read_bytes()).decode()
            for file in sorted((folder / "files").rglob("*"))
            if file.is_file()
        },
        "pictures": [_as_url(picture) for picture in pictures],
    }
    if question.explains and can_explain(task):
        result["looked"] = _as_url(_explain(task, data, inputs))
    return result


def _lines(content: bytes) -> list[str]:
    """Return the lines of a typed text.

    Raises:
        ValueError: The text is not UTF-8, or has too many lines.
    """
    lines = [line for line in content.decode().splitlines() if line.strip()]
    if len(lines) > MOST_LINES:
        raise ValueError(f"the text has {len(lines):,} lines; at most {MOST_LINES} are served")
    return lines


def _with_threshold(task: BaseTask, threshold: float | None) -> BaseTask:
    """Return a view of a task with another threshold, and the same weights.

    Raises:
        ValueError: The threshold is out of range, or the task lacks one.
    """
    if threshold is None:
        return task
    if not hasattr(task, "threshold") or not 0 <= threshold <= 1:
        raise ValueError(f"threshold={threshold} must be from 0 to 1, for tasks that have one")
    view: Any = copy.copy(task)
    view.threshold = threshold
    return view


def _file(question: Question, folder: Path) -> Path:
    """Return the file of an upload: only the ending of the client's name takes part."""
    ending = re.search(r"\.[A-Za-z0-9]{1,8}$", question.name)
    return folder / f"input{ending[0].lower() if ending else ''}"


def _shown_name(question: Question) -> str:
    return re.split(r"[/\\]", question.name)[-1][:200] or "input"


def _check_pixels(file: Path, most: int) -> None:
    """Refuse a large image by its header; other files fail where they are read.

    Raises:
        ValueError: Names the limit.
    """
    try:
        with Image.open(file) as image:
            size = image.size
    except Exception:  # no image, or one that its reader refuses with a reason
        return
    if math.prod(size) > most:
        raise ValueError(f"the image has {math.prod(size):,} pixels; at most {most:,} are served")


def _explain(task: BaseTask, data: Any, file: Path) -> Image.Image:
    """Return the image with the class activation map of the last block over it."""
    import numpy as np
    import torch

    from tools.analyses.figures import overlay
    from tools.analyses.kinds import cam
    from tools.analyses.subjects import Subject

    model = task.model if getattr(task.model, "keeps_classifier", None) is not None else None
    data.predict_path = str(file)
    subject = Subject("", task.model.backbone, model, task.family, task, data, count=1)
    with torch.enable_grad():
        (panel,) = cam.map_panels(subject, next(subject.batches()), cam.OPTIONS)
    picture = overlay(panel.picture, panel.heat, float(panel.heat.max()))
    return Image.fromarray((picture * 255).round().astype(np.uint8))


def _as_url(picture: Image.Image) -> str:
    content = io.BytesIO()
    picture.save(content, "PNG")
    return f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"


def json_value(value: Any) -> Any:
    """Return values that JSON has: arrays as lists, NaN as None."""
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if hasattr(value, "tolist"):
        return json_value(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value
