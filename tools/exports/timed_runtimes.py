"""Time networks in torch, compiled torch, ONNX Runtime and OpenVINO, in float and in INT8."""

from __future__ import annotations

import importlib.util
import itertools
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

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

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Any:
        return self.network(images)


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
        images = networks.example_input(family, batch, shape)
        with tempfile.TemporaryDirectory() as folder:
            steps = _steps(network, images, runtimes, threads, options, Path(folder))
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


def _steps(
    network: Network,
    images: Tensor,
    runtimes: Sequence[str],
    threads: int,
    options: Mapping[str, str],
    folder: Path,
) -> dict[str, Step]:
    """Return a forward pass of the same input per runtime and form."""
    from tools.exports.tracing import inference_form

    settings = {**options, "compile": "false"}
    model: Any = _Wrapped(inference_form(networks.build_network(network, settings))).eval()
    steps = {"torch": _torch_step(model, images)}
    if "compiled" in runtimes:
        print_status("torch.compile takes up to minutes per network, size and batch")
        compiled = networks.to_device(model, {**settings, "compile": "true"})
        steps["compiled torch"] = _torch_step(compiled, images)
    if not set(runtimes) & set(QUANTISED):
        return steps
    files = _graphs(model, images, folder, network_label(network), int8=options["int8"] == "true")
    for runtime, (form, file) in itertools.product(runtimes, files.items()):
        if runtime in QUANTISED:
            opened = _onnxruntime if runtime == "onnxruntime" else _openvino
            steps[f"{runtime}{form}"] = opened(file, images, threads)
    return steps


def _torch_step(model: Any, images: Tensor) -> Step:
    def forward() -> None:
        with torch.inference_mode():
            model(images)

    return forward


def _graphs(model: Any, images: Tensor, folder: Path, label: str, *, int8: bool) -> dict[str, Path]:
    """Write the graph of a network for an input, and its INT8 form; by what is added to a name."""
    from tools.exports.checked_files import save_onnx
    from tools.exports.int8_graph import network_layers, quantise
    from tools.exports.networks import list_outputs
    from tools.exports.requests import check_equal
    from tools.exports.tracing import culprit

    path = folder / "float.onnx"
    try:
        with torch.no_grad():
            program = torch.export.export(model, (images,))
        session = save_onnx(program, path, {}, input_names=["images"])
    except Exception as error:  # torch.export raises any error of the traced code
        raise ValueError(f"{label} cannot be a graph: {culprit(model, error)}") from error
    with torch.inference_mode():
        expected = list_outputs(model, images)
    answers = session.run(None, {"images": images.numpy()})
    check_equal(label, expected, [torch.from_numpy(array) for array in answers], TOLERANCE)
    files = {"": path}
    import onnx

    if int8 and (layers := network_layers(onnx.load(path))):
        files[" INT8"] = folder / "int8.onnx"
        feeds = ({"images": torch.randn_like(images).numpy()} for _ in range(CALIBRATED))
        quantise(path, files[" INT8"], feeds, layers)
    return files


def _onnxruntime(path: Path, images: Tensor, threads: int) -> Step:
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads, settings.inter_op_num_threads = threads, 1
    session = onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])
    feed = {"images": images.numpy()}
    return lambda: session.run(None, feed)


def _openvino(path: Path, images: Tensor, threads: int) -> Step:
    import openvino

    from tools.exports.openvino_graph import EXACT, convert

    settings = {**EXACT, "INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
    model = openvino.compile_model(convert(path), "CPU", settings)
    request, feed = model.create_infer_request(), {"images": images.numpy()}
    return lambda: request.infer(feed)
