"""Export of a family's whole network as one ONNX model or torch.export program.

The family describes the graph: ``tasks.engine.graphs``.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from torch.export import Dim, ExportedProgram

import tasks
from tasks.engine.family import find_family, imported
from tasks.engine.graphs import Axes, NetworkGraph
from tools.exports.checked_files import save_onnx, save_program
from tools.exports.requests import ExportRequest, check_equal
from tools.exports.tracing import culprit, inference_form

TOLERANCE = 1e-4  # of onnxruntime
SUFFIXES = {"onnx": ".onnx", "torch_export": ".pt2"}


def export(request: ExportRequest) -> list[Path]:
    """Write the graph of a run's network, open the file and compare.

    Raises:
        ValueError: The network cannot be recorded or written, or outputs differ.
    """
    assert request.ckpt is not None  # check_exported asks for a run
    task: Any = tasks.load(request.ckpt)
    graph: NetworkGraph = imported(find_family(task.family.name).graph)(
        task, inference_form(task.model), request.folder, request.label
    )
    program, axes = _record(graph, request.label)
    path = request.folder / f"{graph.name}{SUFFIXES[request.to]}"
    names = [axis[0] for axis in axes.values()]
    if request.to == "onnx":
        session = save_onnx(
            program,
            path,
            {graph.entry: graph.facts},
            input_names=list(graph.inputs),
            output_names=[graph.output],
            dynamic_shapes=(dict(zip(axes, names, strict=True)),) * len(graph.inputs),
        )
        # An input that changes nothing is absent from the graph.
        graph_inputs = {entry.name for entry in session.get_inputs()}
    else:
        module = save_program(program, path, graph.facts, graph.entry)
    for inputs in graph.trials(axes):
        if request.to == "onnx":
            pairs = zip(graph.inputs, inputs, strict=True)
            feed = {name: values.numpy() for name, values in pairs if name in graph_inputs}
            output, tolerance = torch.from_numpy(session.run(None, feed)[0]), TOLERANCE
        else:
            output, tolerance = module(*inputs), 1e-5
        with torch.inference_mode():
            expected = graph.network(*inputs)
        subject = f"{path.name} at {'x'.join(map(str, inputs[0].shape))}"
        check_equal(subject, [expected], [output], tolerance)
    readme = request.folder / "README.md"
    readme.write_text(f"# {request.label}\n\n{graph.readme(path.name, names)}")
    return [path, *graph.files, readme]


def _record(graph: NetworkGraph, label: str) -> tuple[ExportedProgram, Axes]:
    """Record a network with as many free axes as it allows."""
    error: Exception | None = None
    # Named axes must be proved free; if torch's algebra cannot do so, the runs decide.
    for axes, has_names in itertools.product(graph.axes, (True, False)):
        dims: Any = {
            axis: Dim(name, min=least, max=most) if has_names else Dim.AUTO(min=least, max=most)
            for axis, (name, least, most) in axes.items()
        }
        trials = graph.trials(axes)
        try:
            with torch.no_grad():
                shapes = (dims,) * len(graph.inputs)
                program = torch.export.export(graph.network, trials[0], dynamic_shapes=shapes)
                run = program.module()
                for inputs in trials:
                    run(*inputs)
            return program, axes
        except Exception as failed:  # torch.export raises any error of the traced code
            error = failed
    assert error is not None
    why = culprit(graph.network, error)
    raise ValueError(f"{label} cannot be recorded as a graph: {why}") from error
