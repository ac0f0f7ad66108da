"""Export of a run as one ONNX model from inputs to answers, checked on its validation samples.

The family describes the graph by ``Family.whole_graph``, a ``tasks.engine.graphs.WholeGraph``.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

import tasks
from backbones import Backbone
from backbones.lora import merge_adapters
from tasks.engine.family import find_family, imported
from tasks.engine.graphs import Axes, NotWholeError, WholeGraph, distance
from tasks.engine.instantiate import build
from tools.cli.arguments import parse_integer
from tools.exports import int8
from tools.exports.checked_files import open_onnx, save_onnx
from tools.exports.networks import list_outputs
from tools.exports.onnx_model import NOT_RUN
from tools.exports.paired_metrics import GROUPS, PairedMetric
from tools.exports.preprocessing import FROM_RUN, describe_preprocessing
from tools.exports.requests import ExportRequest, check_equal
from tools.exports.tracing import (
    LONG,
    culprit,
    inference_form,
    size_reason,
    with_any_size_pools,
)
from tools.runs.fingerprints import fingerprints

NAME, INFER = "whole.onnx", "infer.py"
RUNTIMES = {"onnx": "onnxruntime", "openvino": "openvino"}
TOLERANCE = 1e-3  # of an answer, relative above 1
POINTS = 0.1  # by which the metric may differ
SIDES = (1, 150, 173)  # batch, height, width of images to try a graph on
MANY = 0.05  # share of answers that may differ at sizes to try, where they are choices
LICENCE = "unstated: the run records none; ask those who trained it"


@dataclass(frozen=True)
class Recorded:
    """A graph as recorded.

    Attributes:
        axes: Its free axes.
        lengths: The length of each other axis, by its name.
        why_fixed: The reason why they are fixed, a clause; empty if all are free.
    """

    axes: Axes
    lengths: Mapping[str, int]
    why_fixed: str


@dataclass
class Comparison:
    """Graph and checkpoint on the same samples.

    Attributes:
        samples: Number of samples.
        answers: Number of compared answers.
        differing: Number of those that differ by more than ``TOLERANCE``.
        worst: Largest difference.
        before: Metric of the checkpoint.
        after: Metric of the graph.
    """

    samples: int = 0
    answers: int = 0
    differing: int = 0
    worst: float = 0.0
    before: float = 0.0
    after: float = 0.0

    def check(self, metric: str, flips: float, point: float | None) -> None:
        """Refuse a graph of other answers.

        Args:
            metric: Name of the metric, for the message.
            flips: Share of the answers that may differ.
            point: One point of the metric; None for a hundredth of its value.

        Raises:
            ValueError: Answers or metric differ by more than rounding.
        """
        limit = max(1, int(flips * self.answers)) if flips else 0
        if self.differing > limit:
            raise ValueError(
                f"{self.differing:,} of {self.answers:,} answers of the graph differ from the "
                f"checkpoint's on {self.samples:,} validation samples, by up to {self.worst:.1e}; "
                "not exported"
            )
        margin = max(POINTS, 100 / self.samples)
        margin *= abs(self.before) / 100 if point is None else point
        if not abs(self.after - self.before) <= margin:  # also true for NaN
            raise ValueError(
                f"{metric} is {self.after:.6g} by the graph and {self.before:.6g} by the "
                f"checkpoint on {self.samples:,} validation samples; not exported"
            )


def export(request: ExportRequest) -> list[Path]:
    """Write the graph of a run with a script that calls it, and compare it with the checkpoint.

    Raises:
        NotWholeError: The run cannot be one graph.
        ValueError: The graph's answers or metric differ from the checkpoint's.
    """
    assert request.ckpt is not None, "a run has a checkpoint"
    assert request.run is not None, "whole_or asks for a run"
    family = find_family(request.run["task_name"])
    if not family.whole_graph:
        raise NotWholeError(f"networks of task={family.name} lack a graph from inputs to answers")
    samples = parse_integer("samples", request.settings["samples"])
    wants_int8, keeps = int8.settings(request.settings)
    task: Any = tasks.load(request.ckpt)
    data = _validation_data(request.run)
    network: Any = inference_form(task.model)
    if isinstance(getattr(network, "backbone", None), Backbone):
        merge_adapters(network.backbone)
    graph: WholeGraph = imported(family.whole_graph)(task, network).eval().requires_grad_(False)
    if wants_int8:  # a group of samples is of whole batches
        count = min(samples, len(data.dataset("val")))
        data.eval_batch_size = max(1, min(data.eval_batch_size, count // GROUPS))
    batches = data.spaced_loader("val", samples)
    first = graph.feed(graph.groups(next(iter(batches)))[0])
    path = request.folder / NAME
    facts = _facts(request, task, data, graph)
    recorded, session = _write_checked(request, graph, first, path, facts)
    open_file = open_onnx
    if request.to == "openvino":
        from tools.exports import openvino_graph

        open_file = openvino_graph.open_session
        session = open_file(path)
    request.report(f"{NAME}: comparing answers on {len(batches.sampler):,} validation samples")
    compared = _compare(graph, session, task, data, batches)
    compared.check(family.monitor, graph.flips, graph.point)

    def compare_int8(file: Path, layers: int, names: Sequence[str]) -> int8.Measured:
        pair, number = PairedMetric(task, compared.samples), compared.samples
        for batch, predicted, answers in _answered(graph, open_file(file), task, data, batches):
            after = graph.predictions(predicted, answers)
            pair.update(batch, predicted, after, len(answers[0]))
        return int8.measured(task, graph, pair.compute(), number, layers, names)

    def feeds(number: int) -> Iterator[dict[str, Any]]:
        return _feeds(graph, session, data.spaced_loader("train", number))

    result = None
    if wants_int8:
        result = int8.write_int8(path, feeds, compare_int8, keeps=keeps, report=request.report)
    script, readme = request.folder / INFER, request.folder / "README.md"
    files, code = [path], graph.script.read_text("utf-8")
    if request.to == "openvino":
        files, code = openvino_graph.save(path), openvino_graph.script(code)
    script.write_text(code, "utf-8")
    text = _readme(request, family.monitor, graph, recorded, compared, files[0].name)
    lines = int8.readme_lines(result) if result else []
    readme.write_text("\n".join([text, *lines]) + "\n", "utf-8")
    return [*files, script, readme]


def _validation_data(run: Mapping[str, Any]) -> Any:
    """Return the run's data module with its validation samples.

    Raises:
        NotWholeError: The samples are absent.
    """
    options = {key: value for key, value in run["data"].items() if key != "predict_path"}
    options |= {"num_workers": 0} | ({"resident": False} if "resident" in options else {})
    data = build(options, "data", seed=run["seed"])
    try:
        data.setup("validate")
    except (ValueError, OSError, ImportError) as error:
        raise NotWholeError(f"the run's validation samples cannot be read: {error}") from error
    return data


def _write_checked(
    request: ExportRequest, graph: WholeGraph, first: tuple[Tensor, ...], path: Path, facts: Any
) -> tuple[Recorded, Any]:
    """Write a graph with as many free axes as its network and onnxruntime allow, and open it.

    Raises:
        NotWholeError: The graph cannot be recorded, written or run.
    """
    cause, why = None, ""
    for axes in graph.axes:
        sizes = " and ".join(name for name, _, _ in axes.values())
        request.report(f"{NAME}: recording a graph of free {sizes} {LONG}")
        network = with_any_size_pools(graph) if len(axes) > 1 else graph
        trials = _trials(first, axes)
        try:
            program = _record(network, trials, axes)
            request.report(f"{NAME}: converting {len(program.graph.nodes)} operations to ONNX")
            session = _write(graph, program, trials[0], axes, path, facts)
            _check_trials(graph, session, trials)
        except Exception as error:  # torch.export raises any error of the traced code
            cause, why = error, size_reason(network, error)
            request.report(f"{NAME}: free {sizes} failed: {why}")
            continue
        shape, names = trials[0][0].shape, graph.axes[0]
        lengths = {names[axis][0]: shape[axis] for axis in names if axis not in axes}
        return Recorded(axes, lengths, why if lengths else ""), session
    assert cause is not None
    raise NotWholeError(f"the network cannot be one graph: {culprit(network, cause)}") from cause


def _record(network: Any, trials: Sequence[tuple[Tensor, ...]], axes: Axes) -> ExportedProgram:
    """Record a network for the free axes."""
    # Named axes must be proved free; if torch's algebra cannot do so, the runs decide.
    try:
        return _exported(network, trials, axes, has_names=True)
    except Exception:  # as above
        return _exported(network, trials, axes, has_names=False)


def _exported(
    network: Any, trials: Sequence[tuple[Tensor, ...]], axes: Axes, *, has_names: bool
) -> ExportedProgram:
    """Record a network for named axes, or for axes that torch may narrow."""
    dims: dict[int, Any] = {}
    for axis, (name, least, most) in axes.items():
        limits = {"min": min(least, trials[0][0].shape[axis]), "max": most}
        dims[axis] = Dim(name, **limits) if has_names else Dim.AUTO(**limits)
    with torch.no_grad():
        shapes = tuple(dims if _has_axes(x, trials[0]) else {} for x in trials[0])
        return torch.export.export(network, trials[0], dynamic_shapes=shapes)


def _has_axes(x: Tensor, inputs: Sequence[Tensor]) -> bool:
    """Return True if an input has the free axes, as inputs like the first one do."""
    return x.ndim == inputs[0].ndim


def _trials(first: tuple[Tensor, ...], axes: Axes) -> list[tuple[Tensor, ...]]:
    """Return inputs of several batches and sizes, made of the first ones.

    A graph is recorded of the first ones returned, whose coarsest maps have several places, since
    torch tells 1 from other numbers. The others are the least ones and some between them.
    """
    first_sizes = {axis: first[0].shape[axis] for axis in axes}
    small = {axis: min(least, first_sizes[axis]) for axis, (_, least, _) in axes.items()}
    middle, large = (
        {
            axis: min(
                max(first_sizes[axis], share * side), most or share * side + first_sizes[axis]
            )
            for (axis, (_, _, most)), side in zip(axes.items(), SIDES, strict=False)
        }
        for share in (1, 2)
    )
    return [
        tuple(_resized(x, sizes) if _has_axes(x, first) else x for x in first)
        for sizes in ({**large, 0: 2}, {**small, 0: 1}, {**middle, 0: 3})
    ]


def _resized(x: Tensor, sizes: Mapping[int, int]) -> Tensor:
    """Return a tensor of other sizes, cut or repeated."""
    for axis, size in sizes.items():
        x = x.index_select(axis, torch.arange(size) % x.shape[axis])
    return x


def _facts(request: ExportRequest, task: Any, data: Any, graph: WholeGraph) -> dict[str, Any]:
    """Return the metadata of the file.

    Raises:
        NotWholeError: The run's preparation of images is unknown.
    """
    assert request.ckpt is not None
    assert request.run is not None
    facts = {
        "task": request.run["task_name"],
        **graph.facts(task),
        "licence": request.settings["licence"] or LICENCE,
        "fingerprint": {
            "checkpoint": hashlib.sha256(request.ckpt.read_bytes()).hexdigest(),
            "data": fingerprints(data),
        },
    }
    if find_family(request.run["task_name"]).export_of("onnx") == "classifier":
        size = data.image_size, data.image_size
        prepared = describe_preprocessing(
            request.run, task.model.backbone, size, has_fixed_size=True
        )
        if prepared["source"] != FROM_RUN:
            raise NotWholeError("this augmentation prepares images by rules of its own")
        facts["preprocessing"] = prepared
    return facts


def _write(
    graph: WholeGraph, program: ExportedProgram, first: tuple[Tensor, ...], axes: Axes,
    path: Path, facts: Any,
) -> Any:  # fmt: skip
    """Write the graph and open it."""
    names = {axis: entry[0] for axis, entry in axes.items()}
    return save_onnx(
        program,
        path,
        facts,
        input_names=list(graph.inputs),
        output_names=list(graph.outputs),
        dynamic_shapes=tuple(names if _has_axes(x, first) else {} for x in first),
        custom_translation_table=graph.operators(),
    )


def _arrays(session: Any, graph: WholeGraph, inputs: Sequence[Tensor]) -> dict[str, Any]:
    """Return the inputs of a graph by name; an input that changes nothing is absent from it."""
    names = {entry.name for entry in session.get_inputs()}
    pairs = zip(graph.inputs, inputs, strict=True)
    return {name: values.numpy() for name, values in pairs if name in names}


def _feed(session: Any, graph: WholeGraph, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the answers of a graph."""
    answers = session.run(None, _arrays(session, graph, inputs))
    return [torch.from_numpy(array) for array in answers]


def _feeds(graph: WholeGraph, session: Any, batches: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Yield the inputs of batches of a loader."""
    for part in (part for batch in batches for part in graph.groups(batch)):
        yield _arrays(session, graph, graph.feed(part))


def _compare(
    graph: WholeGraph, session: Any, task: Any, data: Any, batches: Iterable[Any]
) -> Comparison:
    """Compare every answer of graph and checkpoint, and their metrics."""
    graph.prepare(task, data)
    second_task, compared = copy.deepcopy(task), Comparison()
    for judged in (task, second_task):
        judged.reset_metrics()
    for batch, predicted, answers in _answered(graph, session, task, data, batches):
        with torch.no_grad():
            differences = graph.differences(predicted, answers)
        second_task.update_metrics(batch, graph.predictions(predicted, answers))
        task.update_metrics(batch, predicted)
        compared.samples += len(answers[0])
        compared.answers += len(differences)
        compared.differing += int((~(differences <= TOLERANCE)).sum())
        compared.worst = (
            max(compared.worst, float(differences.max())) if len(differences) else compared.worst
        )
    name = task.family.monitor
    compared.before, compared.after = (
        float(judged.compute_metrics()[name]) for judged in (task, second_task)
    )
    return compared


def _answered(
    graph: WholeGraph, session: Any, task: Any, data: Any, batches: Iterable[Any]
) -> Iterator[tuple[Any, Any, list[Tensor]]]:
    """Yield batches of inputs of one size with the checkpoint's predictions and graph's answers.

    Raises:
        NotWholeError: The graph takes one size, and samples have others.
    """
    for raw in (part for batch in batches for part in graph.groups(batch)):
        try:
            answers = _feed(session, graph, graph.feed(raw))
        except NOT_RUN as error:
            raise NotWholeError(
                f"the graph takes one size, and validation samples have others: {error}"
            ) from error
        batch = data.normalise(task.move_batch(raw))
        with torch.no_grad():
            predicted = task.predict_for_metrics(batch)
        yield batch, predicted, answers


def _check_trials(graph: WholeGraph, session: Any, trials: Sequence[tuple[Tensor, ...]]) -> None:
    """Run the file on other batches and sizes, whose answers must be those of the network.

    Of labels and of detections a few may differ, as rounding may change a choice.

    Raises:
        ValueError: Answers have another shape or other values.
    """
    for inputs in trials:
        with torch.no_grad():
            outputs = list_outputs(graph, *inputs)
        expected = [x.float() for x in outputs]
        subject = f"{NAME} at {'x'.join(map(str, inputs[0].shape))}"
        answers = _feed(session, graph, inputs)
        check_equal(subject, expected, [x.float() for x in answers], torch.inf)  # their shapes
        pairs = zip(outputs, expected, answers, strict=True)
        parts = (
            [(graph.choices(outputs, answers), MANY)]
            if graph.flips
            else [
                (distance(before, after.float()), 0 if output.is_floating_point() else MANY)
                for output, before, after in pairs
            ]
        )
        for differences, most in parts:
            share = float((differences > TOLERANCE).float().mean())
            if share > most:
                raise ValueError(f"{subject} differs in {100 * share:.2g} % of its values")


def _readme(
    request: ExportRequest, metric: str, graph: WholeGraph, recorded: Recorded,
    compared: Comparison, name: str,
) -> str:  # fmt: skip
    """Return the text beside the graph."""
    sizes = " and ".join(name for name, _, _ in recorded.axes.values())
    reason = ""
    if recorded.lengths:
        names = " and ".join(recorded.lengths)
        lengths = " x ".join(map(str, recorded.lengths.values()))
        reason = f" Its {names} are fixed at {lengths}, because {recorded.why_fixed}."
    lines = [
        f"# {request.label} as one graph",
        "",
        f"`python {INFER} INPUT ...` runs `{name}` with numpy, pillow and {RUNTIMES[request.to]} "
        "alone. In Python: `from infer import predict`, then `predict([INPUT, ...])`.",
        "",
        f"Inputs: {', '.join(graph.inputs)}. Answers: {', '.join(graph.outputs)}. Free axes: "
        f"{sizes}.{reason} The file's metadata hold classes, preparation of inputs, licence and "
        "the run's fingerprint.",
        "",
        f"Checked on {compared.samples:,} validation samples of the run: of {compared.answers:,} "
        f"answers {compared.differing:,} differ by more than {TOLERANCE:.0e}, the most by "
        f"{compared.worst:.1e}; {metric} is {compared.after:.6g} by the graph and "
        f"{compared.before:.6g} by the checkpoint.",
    ]
    return "\n".join(lines)
