"""Whole graphs for OpenVINO: conversion from ONNX, a session, and the script that runs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

NAME = "whole.xml"
FACTS = "mixerlab"  # of the model's runtime information
# By default processors of bfloat16 compute in it, and answers differ by parts in a hundred.
EXACT = {"INFERENCE_PRECISION_HINT": "f32"}
ENTRIES = "facts = {k: json.loads(v) for k, v in "
# The lines of a family's infer.py that name the runtime, and those of OpenVINO.
SCRIPT = {
    ", onnxruntime\n": ", openvino\n",
    'session = onnxruntime.InferenceSession(pathlib.Path(__file__).with_name("whole.onnx"))\n': (
        'model = openvino.Core().read_model(pathlib.Path(__file__).with_name("whole.xml"))\n'
    ),
    f"{ENTRIES}session.get_modelmeta().custom_metadata_map.items()}}\n": (
        f'{ENTRIES}model.get_rt_info("mixerlab").value.items()}}\n'
        f'compiled = openvino.compile_model(model, "CPU", {EXACT})\n'
        "\n"
        "class session:\n"
        "    def run(names, feed):\n"
        "        answers = compiled(feed)\n"
        "        return [answers[k] for k in names or [out.any_name for out in compiled.outputs]]\n"
    ),
}  # fmt: skip


class Session:
    """A graph of OpenVINO with the calls of an onnxruntime session.

    Args:
        model: From ``openvino.convert_model`` or ``read_model``.
    """

    def __init__(self, model: Any) -> None:
        import openvino

        self.model = openvino.compile_model(model, "CPU", EXACT)

    def get_inputs(self) -> list[Any]:
        """Return the inputs, which have names."""
        return [SimpleNamespace(name=entry.any_name) for entry in self.model.inputs]

    def run(self, names: Sequence[str] | None, feed: Mapping[str, Any]) -> list[NDArray[Any]]:
        """Return the named answers, by default all."""
        answers = self.model(dict(feed))
        names = names or [entry.any_name for entry in self.model.outputs]
        return [np.array(answers[name]) for name in names]


def convert(path: Path) -> Any:
    """Return the OpenVINO model of an ONNX file, with its metadata.

    Raises:
        ValueError: OpenVINO lacks an operator; the message is its own.
    """
    import openvino

    try:
        model = openvino.convert_model(path)
    except RuntimeError as error:  # the frontend's errors
        raise ValueError(f"OpenVINO does not take the graph: {_line(error)}") from error
    for entry in onnx.load(path, load_external_data=False).metadata_props:
        model.set_rt_info(entry.value, [FACTS, entry.key])
    return model


def open_session(path: Path) -> Session:
    """Return a session of an ONNX file in OpenVINO."""
    return Session(convert(path))


def save(path: Path) -> list[Path]:
    """Replace an ONNX file by OpenVINO's two files, in full precision, and return these."""
    import openvino

    target = path.with_name(NAME)
    openvino.save_model(convert(path), target, compress_to_fp16=False)
    path.unlink()
    return [target, target.with_suffix(".bin")]


def script(text: str) -> str:
    """Return a family's infer.py for OpenVINO."""
    for line, ours in SCRIPT.items():
        assert line in text, line
        text = text.replace(line, ours)
    return text.replace("onnxruntime", "openvino")


def _line(error: BaseException) -> str:
    """Return the last line of a message, which names the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:300]
