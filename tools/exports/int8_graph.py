"""Static INT8 quantisation of an exported graph by onnxruntime, and the layers that it harms.

Activations are asymmetric bytes with one range per tensor, weights symmetric ones with a range per
output channel. Only layers of the network are quantised: what stands before and after it, such as
normalisation, decoding and suppression, stays in float.
"""

from __future__ import annotations

import ast
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import helper
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

LAYERS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
# The sum of a linear layer is in float anyway; rounding it again would lose what it holds.
FLOAT_OUTPUTS = ["Gemm", "MatMul"]
PAIR = ("QuantizeLinear", "DequantizeLinear")
SCOPES = "pkg.torch.onnx.name_scopes"  # where torch's converter writes a node's modules
NETWORK = "network."  # path of its modules in a WholeGraph

Feed = Mapping[str, NDArray[Any]]


class _Reader(CalibrationDataReader):  # type: ignore[misc]
    """Inputs as onnxruntime asks for them."""

    def __init__(self, feeds: Iterable[Feed]) -> None:
        self.feeds: Iterator[Feed] = iter(feeds)

    def get_next(self) -> Any:
        """Return the next inputs; None after the last."""
        return next(self.feeds, None)


def network_layers(model: onnx.ModelProto) -> dict[str, str]:
    """Return the layers to quantise, a readable name per node, in the order of the graph.

    The last convolutions stay in float: their outputs are the answers.
    """
    labels, leads_to_layer = {}, set()
    for node in reversed(model.graph.node):
        scopes = _scopes(node)
        is_layer = node.op_type in LAYERS and any(name.startswith(NETWORK) for name in scopes)
        leads = any(name in leads_to_layer for name in node.output)
        if is_layer and (leads or node.op_type in FLOAT_OUTPUTS):
            labels[node.name] = scopes[-2].removeprefix(NETWORK)
        if is_layer or leads:
            leads_to_layer.update(node.input)
    numbers = Counter(labels.values())
    return {
        name: label if numbers[label] == 1 else f"{label}, {name}"
        for name, label in reversed(labels.items())
    }


def _scopes(node: onnx.NodeProto) -> Sequence[str]:
    """Return the paths of the modules that called a node, from the whole graph inwards."""
    texts = [entry.value for entry in node.metadata_props if entry.key == SCOPES]
    return list(ast.literal_eval(texts[0])) if texts else []


def quantise(source: Path, target: Path, feeds: Iterable[Feed], names: Collection[str]) -> None:
    """Write a graph with some of its layers in INT8.

    Args:
        source: Graph in float.
        target: File to write.
        feeds: Inputs to calibrate the ranges of activations on.
        names: Nodes to quantise, at least one.
    """
    assert names, "onnxruntime takes an empty list for all nodes"
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)  # it recommends steps that the converter has taken
    try:
        quantize_static(
            source,
            target,
            _Reader(feeds),
            op_types_to_quantize=list(LAYERS),
            nodes_to_quantize=list(names),
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            extra_options={"OpTypesToExcludeOutputQuantization": FLOAT_OUTPUTS},
        )
    finally:
        logging.disable(level)
    model = onnx.load(target)
    _read_in_float(model, {node.name for node in model.graph.node} - {*names})
    onnx.save(model, target)


def _read_in_float(model: onnx.ModelProto, names: Collection[str]) -> None:
    """Let layers that stay in float read activations as they are, before any rounding.

    A convolution's output is left unrounded as well if such a layer reads it, directly or behind an
    activation function.
    """
    makers = {name: node for node in model.graph.node for name in node.output}
    constants = {entry.name for entry in model.graph.initializer}
    exact = {}  # rounded activations by name -> as they were
    for node in model.graph.node:
        source = makers.get(node.input[0]) if node.input else None
        if source is not None and (source.op_type, node.op_type) == PAIR:
            exact[node.output[0]] = source.input[0]
    for rounded, source in exact.items():
        readers = _readers(model, rounded, constants)
        float_readers = [node for node in readers if node.op_type in LAYERS and node.name in names]
        is_output = source in makers and makers[source].op_type in LAYERS
        for node in readers if float_readers and is_output else float_readers:
            node.input[:] = [source if name == rounded else name for name in node.input]
    _remove_unread(model)


def _readers(
    model: onnx.ModelProto, name: str, constants: Collection[str]
) -> Sequence[onnx.NodeProto]:
    """Return the nodes that read an activation, or what functions of it alone make of it."""
    copies, readers = {name}, []
    for node in model.graph.node:
        if copies & {*node.input}:
            readers.append(node)
            if node.op_type not in LAYERS and {*node.input} <= copies | {*constants}:
                copies.update(node.output)
    return readers


def _remove_unread(model: onnx.ModelProto) -> None:
    """Remove roundings that no node reads."""
    while True:
        is_read = {name for node in model.graph.node for name in node.input}
        is_read |= {output.name for output in model.graph.output}
        unread = [
            node
            for node in model.graph.node
            if node.op_type in PAIR and node.output[0] not in is_read
        ]
        if not unread:
            return
        for node in unread:
            model.graph.node.remove(node)


def cosines(source: Path, quantised: Path, feeds: Iterable[Feed]) -> dict[str, float]:
    """Return per INT8 layer the cosine between its outputs in INT8 and in float.

    Each layer reads the float graph's activations, so that it answers for its own rounding alone:
    that of its inputs and its weights.

    Args:
        source: Graph in float.
        quantised: The same with layers in INT8.
        feeds: Inputs of the graph.
    """
    pieces = _layer_models(onnx.load(quantised))
    model = onnx.load(source)
    tensors = {output for piece in pieces.values() for output in _names(piece.graph.output)}
    tensors |= {entry for piece in pieces.values() for entry in _names(piece.graph.input)}
    entries_of_graph = {*_names(model.graph.output), *_names(model.graph.input)}
    model.graph.output.extend(
        onnx.ValueInfoProto(name=name) for name in sorted(tensors - entries_of_graph)
    )
    session = _session(model)
    layers = {name: _session(piece) for name, piece in pieces.items()}
    sums = {name: np.zeros(3) for name in pieces}
    names = _names(session.get_outputs())
    for feed in feeds:
        values = {**feed, **dict(zip(names, session.run(None, dict(feed)), strict=True))}
        for name, layer in layers.items():
            inputs = {entry: values[entry] for entry in _names(layer.get_inputs())}
            rounded = layer.run(None, inputs)[0].ravel().astype(float)
            exact = values[layer.get_outputs()[0].name].ravel().astype(float)
            sums[name] += rounded @ exact, rounded @ rounded, exact @ exact
    with np.errstate(invalid="ignore"):
        return {
            name: float(np.nan_to_num(dot / np.sqrt(first * second), nan=1.0))
            for name, (dot, first, second) in sums.items()
        }


def _layer_models(model: onnx.ModelProto) -> dict[str, onnx.ModelProto]:
    """Return a model per INT8 layer: the layer and the rounding of what it reads."""
    makers = {name: node for node in model.graph.node for name in node.output}
    constants = {entry.name: entry for entry in model.graph.initializer}
    pieces = {}
    for layer in model.graph.node:
        rounded = [makers[name] for name in layer.input if name in makers]
        if layer.op_type not in LAYERS or PAIR[1] not in {node.op_type for node in rounded}:
            continue
        nodes, todo, entries = [layer], list(layer.input), {}
        for name in todo:
            if name in constants or not name:
                continue
            maker = makers.get(name)
            if maker is not None and maker.op_type in PAIR:
                if maker not in nodes:
                    nodes.append(maker)
                    todo += maker.input
            else:
                entries[name] = helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)
        graph = helper.make_graph(
            nodes[::-1],
            "layer",
            list(entries.values()),
            [helper.make_tensor_value_info(layer.output[0], onnx.TensorProto.FLOAT, None)],
            [constants[name] for name in dict.fromkeys(todo) if name in constants],
        )
        pieces[layer.name] = helper.make_model(
            graph, opset_imports=model.opset_import, ir_version=model.ir_version
        )
    return pieces


def _names(entries: Iterable[Any]) -> list[str]:
    return [entry.name for entry in entries]


def _session(model: onnx.ModelProto) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors; outputs without a shape are meant to be so
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
