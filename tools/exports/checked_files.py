"""Files of a recorded network, written with its facts and opened again to be compared."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


def save_program(program: Any, path: Path, facts: Mapping[str, Any], entry: str) -> Any:
    """Write a program of torch.export and return its module as read back.

    Args:
        program: From ``torch.export.export``.
        path: Of the file.
        facts: Written as JSON into the file, under ``entry`` and ".json".
        entry: Name of the facts.
    """
    content = io.BytesIO()
    torch.export.save(program, content, extra_files={f"{entry}.json": json.dumps(facts)})
    path.write_bytes(content.getvalue())
    with warnings.catch_warnings(action="ignore"):  # torch's on buffers that cannot be written
        return torch.export.load(path).module()


def save_onnx(program: Any, path: Path, facts: Mapping[str, Any], **options: Any) -> Any:
    """Write an ONNX model and return an onnxruntime session of the file on the CPU.

    Args:
        program: From ``torch.export.export``.
        path: Of the file.
        facts: Entries of the model's metadata, each written as JSON.
        options: Of ``torch.onnx.export``.
    """
    level = logging.root.manager.disable
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            model = torch.onnx.export(program, dynamo=True, verbose=False, **options)
        finally:
            logging.disable(level)
    assert model is not None
    model.model.metadata_props.update({name: json.dumps(fact) for name, fact in facts.items()})
    model.save(path, external_data=False)
    return open_onnx(path)


def open_onnx(path: Path) -> Any:
    """Return an onnxruntime session of a file on the CPU, with as many threads as torch."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
