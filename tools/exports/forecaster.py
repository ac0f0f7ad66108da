"""Export of forecasters: ONNX models and torch.export programs of the whole network.

The program takes scaled series (B, L, M). Its metadata has the names, means and deviations of the
variables. The batch is free, and the number of variables where the network allows it.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import tasks
from tools.exports import ExportRequest, check_equal
from tools.exports.checked_files import save_onnx, save_program
from tools.exports.tracing import culprit, inference_form

INPUT, OUTPUT = "series", "forecast"
TOLERANCE = 1e-4
AXES = {0: "batch", 2: "variables"}


def to_torch_export(request: ExportRequest) -> list[Path]:
    """Write a torch.export program, load it and compare.

    Raises:
        ValueError: The network cannot be recorded, or outputs differ.
    """
    network, shape, facts = _open(request)
    program, free = _record(network, shape, request)
    path = request.folder / "forecaster.pt2"
    loaded = save_program(program, path, facts, "series")
    for series in _trials(shape, free):
        with torch.inference_mode():
            check_equal(_at(path, series), [network(series)], [loaded(series)])
    return [path, _readme(request, path, free, facts)]


def to_onnx(request: ExportRequest) -> list[Path]:
    """Write an ONNX model, run it in onnxruntime and compare.

    Raises:
        ValueError: The network cannot be recorded or written, or outputs differ.
    """
    network, shape, facts = _open(request)
    program, free = _record(network, shape, request)
    path = request.folder / "forecaster.onnx"
    session = save_onnx(
        program,
        path,
        facts,
        "series",
        input_names=[INPUT],
        output_names=[OUTPUT],
        dynamic_shapes=({axis: AXES[axis] for axis in free},),
    )
    for series in _trials(shape, free):
        with torch.inference_mode():
            wanted = network(series)
        (found,) = session.run(None, {INPUT: series.numpy()})
        check_equal(_at(path, series), [wanted], [torch.from_numpy(found)], TOLERANCE)
    return [path, _readme(request, path, free, facts)]


def _open(request: ExportRequest) -> tuple[nn.Module, tuple[int, int], dict[str, Any]]:
    """Return the network, the shape (L, M) of an input, and the facts of its variables."""
    if request.ckpt is None:
        raise ValueError("a forecaster is exported from its run: pass ckpt=<run folder>")
    task: Any = tasks.load(request.ckpt)
    network: Any = inference_form(task.model)
    shape = (task.data.lookback, len(task.data.names))
    if network.targets == shape[1]:
        network.targets = None  # all variables, whatever their number
    return network, shape, {**task.series_facts, "horizon": network.horizon, "lookback": shape[0]}


def _record(
    network: Any, shape: tuple[int, int], request: ExportRequest
) -> tuple[ExportedProgram, tuple[int, ...]]:
    """Record the network with as many free axes as it allows."""
    any_number = network.backbone.any_variables and network.targets is None
    trials: list[tuple[int, ...]] = [(0, 2), (0,)] if any_number else [(0,)]
    error: Exception | None = None
    # Named axes must be proved free; if torch's algebra cannot do so, the runs decide.
    for free, named in itertools.product(trials, (True, False)):
        dims: Any = {axis: Dim(AXES[axis], min=1) if named else Dim.AUTO(min=1) for axis in free}
        try:
            with torch.no_grad():
                program = torch.export.export(
                    network, (torch.randn(2, *shape),), dynamic_shapes=(dims,)
                )
                run = program.module()
                for series in _trials(shape, free):
                    run(series)
            return program, free
        except Exception as failed:  # torch.export raises any error of the traced code
            error = failed
    assert error is not None
    why = culprit(network, error)
    raise ValueError(f"{request.backbone} cannot be recorded as a graph: {why}") from error


def _trials(shape: tuple[int, int], free: tuple[int, ...]) -> list[Tensor]:
    """Return series of several batch sizes and, if free, numbers of variables."""
    generator = torch.Generator().manual_seed(0)
    length, variables = shape
    numbers = (variables, 1, variables + 4) if 2 in free else (variables,)
    return [
        torch.randn(batch, length, count, generator=generator)
        for batch in (2, 1, 5)
        for count in numbers
    ]


def _at(path: Path, series: Tensor) -> str:
    return f"{path.name} at {'x'.join(map(str, series.shape))}"


def _readme(
    request: ExportRequest, path: Path, free: tuple[int, ...], facts: dict[str, Any]
) -> Path:
    file = request.folder / "README.md"
    axes = " and ".join(AXES[axis] for axis in free)
    file.write_text(
        f"# {request.label}\n\n`{path.name}` takes `{INPUT}` (B, {facts['lookback']}, "
        f"{len(facts['names'])}) and returns `{OUTPUT}` (B, {facts['horizon']}, "
        f"{facts['targets']}). Free axes: {axes}.\n\nScale each variable by its mean and standard "
        "deviation in the metadata, and undo it for the forecast.\n"
    )
    return file
