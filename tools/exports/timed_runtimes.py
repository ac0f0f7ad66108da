"""Time networks in torch, compiled torch, ONNX Runtime and OpenVINO, in float and in INT8."""

from __future__ import annotations

import importlib.util
import itertools
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tasks.engine.family import Family, imported
from tools.bench import growth
from tools.bench import timed_networks as networks
from tools.bench.timing import Step, interleave, print_status, set_up_process, summarise_ratios
from tools.cli.arguments import parse_integer
from tools.cli.tables import Record
from tools.cli.typed_network import Network, network_label

RUNTIMES = ("torch", "compiled", "onnxruntime", "openvino")
QUANTISED = RUNTIMES[2:]
CALIBRATED = 4  # batches of random inputs; ranges leave the time as it is
TOLERANCE = 1e-3


class _Wrapped(nn.Module):
    """A network under the name by which its layers are found in a graph."""

    inputs: Sequence[str] = ("images",)

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Any:
        return self.network(images)

    def operators(self) -> dict[Any, Any]:
        return {}


def time_runtimes(
    run: Sequence[Network], runtimes: Sequence[str], options: Mapping[str, str]
) -> list[Record]:
    """Time each network in each runtime; return a record each, with ratios to torch.

    Args:
        run: The networks.
        runtimes: Of ``RUNTIMES``, the first one is torch.
        options: As typed, with defaults.

    Raises:
        ValueError: A network cannot be a graph, or its answers differ from torch's.
    """
    task, names = options["task"], [name for name, _ in run]
    shapes = networks.input_shapes(names, options["image_size"], task)
    family = networks.timed_family(names[0], task)
    batches = [parse_integer("batch", item) for item in options["batch"].split(",")]
    rounds = parse_integer("rounds", options["rounds"], least=2)
    threads = parse_integer("threads", options["threads"])
    set_up_process(options)
    records: list[Record] = []
    for network, shape, batch in itertools.product(run, shapes, batches):
        size = growth.format_size(shape, family.channels_first)
        label = network_label(network)
        print_status(f"{label}: {size}, batch {batch}, {rounds} rounds")
        with tempfile.TemporaryDirectory() as folder:
            model, inputs = _model_and_inputs(network, family, batch, shape, options)
            steps = _steps(label, model, inputs, runtimes, threads, options, Path(folder))
            seconds = dict(
                zip(
                    steps,
                    interleave(list(steps.values()), rounds, "cpu", options["clock"]),
                    strict=True,
                )
            )
        for name, row in seconds.items():
            median = statistics.median(row)
            records.append(
                {
                    "backbone": label,
                    "runtime": name,
                    "image_size": size,
                    "batch": batch,
                    "ms": median * 1e3,
                    "images_per_second": batch / median,
                    **summarise_ratios(row, seconds["torch"]),
                }
            )
    return records


def installed_runtimes(text: str) -> list[str]:
    """Return the runtimes to time, torch first; by default all that are installed.

    Raises:
        ValueError: A typed one is unknown or missing.
    """
    from backbones.options import unknown
    from tools.exports.requests import exporter

    names = text.split(",") if text else list(RUNTIMES)
    for name in names:
        if name not in RUNTIMES:
            raise ValueError(unknown("runtime", name, RUNTIMES))
    if set(names) & set(QUANTISED):
        exporter("onnx")  # OpenVINO's models are made from its files
    if "openvino" in names and importlib.util.find_spec("openvino") is None:
        if text:
            exporter("openvino")
        print_status("openvino is left out: it is not installed")
        names.remove("openvino")
    return list(dict.fromkeys(["torch", *names]))


def _model_and_inputs(
    network: Network, family: Family, batch: int, shape: Sequence[int], options: Mapping[str, str]
) -> tuple[Any, tuple[Tensor, ...]]:
    """Build a network and inputs: a detector or segmentor from bytes to boxes or labels."""
    from tools.exports.tracing import inference_form

    model = inference_form(networks.build_network(network, {**options, "compile": "false"}))
    if family.counted is None or not family.counted.parts:
        return _Wrapped(model).eval(), (networks.example_input(family, batch, shape),)
    task = SimpleNamespace(data=SimpleNamespace(bands=None))
    images = torch.randint(0, 256, (batch, *shape[1:], 3), dtype=torch.uint8)
    return imported(family.whole_graph)(task, model).eval(), (images, torch.tensor(shape[1:]))


def _steps(
    label: str,
    model: Any,
    inputs: tuple[Tensor, ...],
    runtimes: Sequence[str],
    threads: int,
    options: Mapping[str, str],
    folder: Path,
) -> dict[str, Step]:
    """Return a forward pass of the same inputs per runtime and form."""
    steps = {"torch": _torch_step(model, inputs)}
    if "compiled" in runtimes:
        print_status("torch.compile takes up to minutes per network, size and batch")
        compiled = networks.compile_network(model, in_parts=len(inputs) > 1)
        steps["compiled torch"] = _torch_step(compiled, inputs)
    if not set(runtimes) & set(QUANTISED):
        return steps
    files = _graphs(model, inputs, folder, label, int8=options["int8"] == "true")
    for runtime, (form, file) in itertools.product(runtimes, files.items()):
        if runtime in QUANTISED:
            opened = _onnxruntime if runtime == "onnxruntime" else _openvino
            feed = {name: x.numpy() for name, x in zip(model.inputs, inputs, strict=True)}
            steps[f"{runtime}{form}"] = opened(file, feed, threads)
    return steps


def _torch_step(model: Any, inputs: tuple[Tensor, ...]) -> Step:
    def forward() -> None:
        with torch.inference_mode():
            model(*inputs)

    return forward


def _graphs(
    model: Any, inputs: tuple[Tensor, ...], folder: Path, label: str, *, int8: bool
) -> dict[str, Path]:
    """Write the graph of a network for some inputs, and its INT8 form; by the ends of names."""
    from tools.exports.checked_files import save_onnx
    from tools.exports.int8_graph import network_layers, quantise
    from tools.exports.networks import list_outputs
    from tools.exports.tracing import culprit

    path = folder / "float.onnx"
    try:
        with torch.no_grad():
            program = torch.export.export(model, inputs)
        session = save_onnx(
            program,
            path,
            {},
            input_names=list(model.inputs),
            custom_translation_table=model.operators(),
        )
    except Exception as error:  # torch.export raises any error of the traced code
        raise ValueError(f"{label} cannot be a graph: {culprit(model, error)}") from error
    names = {entry.name for entry in session.get_inputs()}
    feed = {n: x for n, x in zip(model.inputs, inputs, strict=True) if n in names}
    answers = session.run(None, {name: x.numpy() for name, x in feed.items()})
    with torch.inference_mode():
        expected = list_outputs(model, *inputs)
    _check(label, model, expected, [torch.from_numpy(array) for array in answers])
    files = {"": path}
    import onnx

    if int8 and (layers := network_layers(onnx.load(path))):
        files[" INT8"] = folder / "int8.onnx"
        feeds = (
            {name: _random_like(x).numpy() for name, x in feed.items()} for _ in range(CALIBRATED)
        )
        quantise(path, files[" INT8"], feeds, layers)
    return files


def _random_like(x: Tensor) -> Tensor:
    """Return other inputs of a kind; a size stays as it is."""
    if x.dtype == torch.uint8:
        return torch.randint_like(x, 256)
    return torch.randn_like(x) if x.is_floating_point() else x


def _check(label: str, model: Any, expected: Sequence[Tensor], answers: Sequence[Tensor]) -> None:
    """Compare a graph's answers with torch's: boxes by what they share, others as numbers."""
    from tools.exports.requests import check_equal

    if getattr(model, "flips", 0):
        share = float((model.choices(expected, answers) > TOLERANCE).double().mean())
        if share > model.flips:
            raise ValueError(f"{label}: {share:.1%} of the graph's answers differ from torch's")
        return
    pairs = [pair for pair in zip(expected, answers, strict=True) if pair[0].is_floating_point()]
    check_equal(label, [pair[0] for pair in pairs], [pair[1] for pair in pairs], TOLERANCE)


def _onnxruntime(path: Path, feed: Mapping[str, Any], threads: int) -> Step:
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3  # errors alone
    settings.intra_op_num_threads, settings.inter_op_num_threads = threads, 1
    session = onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])
    inputs = {entry.name: feed[entry.name] for entry in session.get_inputs()}
    return lambda: session.run(None, inputs)


def _openvino(path: Path, feed: Mapping[str, Any], threads: int) -> Step:
    import openvino

    from tools.exports.openvino_graph import EXACT, convert

    settings = {**EXACT, "INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
    model = openvino.compile_model(convert(path), "CPU", settings)
    request = model.create_infer_request()
    inputs = {entry.any_name: feed[entry.any_name] for entry in model.inputs}
    return lambda: request.infer(inputs)
