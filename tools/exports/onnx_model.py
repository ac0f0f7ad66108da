"""Export to ONNX: models for onnxruntime and other readers of the format (``.onnx``)."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnxruntime
import torch
from onnxruntime.capi import onnxruntime_pybind11_state as states
from torch import Tensor, nn

from tools.exports.networks import build_parts, export_class_names, list_outputs
from tools.exports.requests import ExportRequest, check_equal
from tools.exports.tracing import INPUT, LONG, Graph, find_calling_module, inference_form, trace
from tools.exports.usage import Described, output_names, preprocessing, write_usage

TOLERANCE = 1e-4
# Errors of onnxruntime for operators, or shapes, that it does not support.
NOT_RUN = (
    states.Fail, states.InvalidArgument, states.InvalidGraph, states.NotImplemented,
    states.RuntimeException,
)  # fmt: skip


def export(request: ExportRequest) -> list[Path]:
    """Write one model per part of the network, and run each in onnxruntime on several sizes.

    Raises:
        ValueError: An operator lacks an ONNX form or an onnxruntime kernel, or outputs differ.
    """
    files: list[Path] = []
    descriptions: list[Described] = []
    parts = build_parts(request)
    names = export_class_names(request, parts)
    for part, network in parts.items():
        path = request.folder / f"{part}.onnx"
        request.report(f"{path.name}: recording the network as a graph {LONG}")
        graph = trace(inference_form(network), request)
        request.report(
            f"{path.name}: converting {len(graph.program.graph.nodes)} operations to ONNX"
        )
        prepared = preprocessing(request, network.backbone, graph)
        metadata = {"preprocessing": json.dumps(prepared)}
        if names and part == "classifier":
            metadata["class_names"] = json.dumps(list(names))
        outputs = output_names(network)
        try:
            _write_compared(request, graph, network, path, outputs, metadata)
        except ValueError as error:
            if "height" not in graph.free_axes:
                raise ValueError(f"{error}; export it to=torch_export") from error
            request.report(f"{path.name}: any size failed ({error}); recording this one {LONG}")
            graph = trace(inference_form(network), request, why_fixed=str(error))
            _write_compared(request, graph, network, path, outputs, metadata)
        files.append(path)
        descriptions.append(Described(path.name, graph, outputs, prepared))
    return [*files, *write_usage(request, descriptions, names)]


def _write_compared(
    request: ExportRequest,
    graph: Graph,
    network: nn.Module,
    path: Path,
    outputs: Sequence[str],
    metadata: Mapping[str, str],
) -> None:
    """Write a graph and compare the file with the network.

    Raises:
        ValueError: The graph cannot be written, onnxruntime does not run it, or outputs differ.
    """
    _write(request, graph, path, outputs, metadata)
    try:
        _compare(request, graph, network, path)
    except NOT_RUN as error:
        reason = re.sub(r"^\[ONNXRuntimeError\][ :\w]*: ", "", str(error).splitlines()[0])
        raise ValueError(f"onnxruntime does not run {request.backbone}: {reason}") from error


def _compare(request: ExportRequest, graph: Graph, network: nn.Module, path: Path) -> None:
    """Run a written model on several sizes and compare its outputs."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for batch, *size in graph.sizes(request.image_size):
        images = request.images(batch, (size[0], size[1]))
        shape = " x ".join(map(str, images.shape))
        request.report(f"{path.name}: comparing {shape} in onnxruntime")
        with torch.inference_mode():
            expected = list_outputs(network, images)
        subject = f"{path.name} at {batch}x3x{size[0]}x{size[1]}"
        check_equal(subject, expected, _run(session, images), TOLERANCE)


def _write(
    request: ExportRequest,
    graph: Graph,
    path: Path,
    outputs: Sequence[str],
    metadata: Mapping[str, str],
) -> None:
    """Convert a graph and write it to one file, without the converter's progress."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        level = logging.root.manager.disable
        logging.disable(logging.WARNING)
        try:
            model = torch.onnx.export(
                graph.program, dynamo=True, verbose=False, dynamic_shapes=(graph.axes(),),
                input_names=[INPUT], output_names=outputs,
            )  # fmt: skip
            assert model is not None
            model.model.metadata_props.update(metadata)
            model.save(path, external_data=False)
        except torch.onnx.errors.OnnxExporterError as error:
            messages = _messages(error)
            match = re.search(r"aten[.:]+\w+", " ".join(messages))
            operator = match.group().replace("::", ".") if match else "an operator"
            raise ValueError(
                f"{request.backbone} cannot be written as ONNX: "
                f"{find_calling_module(graph.program, operator)}, {operator}: "
                f"{messages[-1].splitlines()[0][:200]}"
            ) from error
        finally:
            logging.disable(level)


def _messages(error: BaseException | None) -> list[str]:
    """Return the messages of an error and of its causes."""
    messages = []
    while error is not None:
        messages.append(str(error) or type(error).__name__)
        error = error.__cause__
    return messages


def _run(session: onnxruntime.InferenceSession, images: Tensor) -> list[Tensor]:
    name = session.get_inputs()[0].name
    return [torch.from_numpy(array) for array in session.run(None, {name: images.numpy()})]
