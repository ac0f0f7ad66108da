"""INT8 form of a whole graph: quantised after training, and measured before it is handed out."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import onnx

from tasks.engine.graphs import WholeGraph
from tools.exports.int8_graph import Feed, cosines, network_layers, quantise
from tools.exports.paired_metrics import Difference

CALIBRATED = 128  # training samples for the ranges of activations
COMPARED = 16  # of them for the cosines of layers
MOST = 1.0  # points that INT8 may lose
FEWEST = 1000  # validation samples for a verdict
SHOWN = 5  # layers in a message

Verdict = Literal["within 1 point", "more than 1 point", "cannot tell"]


@dataclass(frozen=True)
class Measured:
    """A graph in INT8 beside the checkpoint on the same validation samples.

    Attributes:
        metric: Name of the monitored metric.
        before: Its value in float.
        after: Its value in INT8.
        loss: Points lost.
        low: Lower end of the loss's paired 95 % interval.
        high: Its upper end.
        samples: Number of validation samples.
        verdict: See ``judge``.
        layers: Number of layers in INT8.
        float_layers: Layers left in float, the worst first.
        trials: INT8 layers and loss of each attempt, the last one this.
    """

    metric: str
    before: float
    after: float
    loss: float
    low: float
    high: float
    samples: int
    verdict: Verdict
    layers: int
    float_layers: Sequence[str] = ()
    trials: Sequence[Mapping[str, float]] = ()

    def sentence(self) -> str:
        """Return the measurement in a line."""
        return (
            f"{self.metric} is {self.before:.6g} in float and {self.after:.6g} in INT8 on "
            f"{self.samples:,} validation samples: {self.loss:.3g} points lost, 95 % interval "
            f"{self.low:.3g} to {self.high:.3g}"
        )

    def remark(self) -> str:
        """Return the verdict with its reason, and the layers in float."""
        reason = ""
        if self.verdict == "cannot tell":
            few = self.samples < FEWEST
            reason = f" ({FEWEST:,} samples are needed)" if few else " (the interval is too wide)"
        names = f"; in float: {', '.join(self.float_layers)}" if self.float_layers else ""
        return f"{self.verdict}{reason}; {self.layers} layers in INT8{names}"


def judge(samples: int, loss: float, low: float, high: float) -> Verdict:
    """Return the verdict of a loss in points with its 95 % interval.

    "within 1 point" needs ``FEWEST`` samples and an interval that ends below 1. "more than 1 point"
    is a loss above 1 on as many samples, or on fewer an interval that starts above 1.
    """
    enough = samples >= FEWEST
    if low > MOST or (enough and not loss <= MOST):  # also true for NaN
        return "more than 1 point"
    return "within 1 point" if enough and high <= MOST else "cannot tell"


def measured(
    task: Any, graph: WholeGraph, pair: Difference, samples: int, layers: int, names: Sequence[str]
) -> Measured:
    """Return a difference of metrics in points lost, with its verdict."""
    name = task.family.monitor
    point = abs(pair.before) / 100 if graph.point is None else graph.point
    sign = 1 if task.family.direction(name) == "min" else -1
    # Adding 0 turns -0 into 0.
    loss = sign * (pair.after - pair.before) / point + 0.0
    low, high = sorted(sign * end / point + 0.0 for end in (pair.low, pair.high))
    verdict = judge(samples, loss, low, high)
    return Measured(
        name, pair.before, pair.after, loss, low, high, samples, verdict, layers, tuple(names)
    )


def write_int8(
    path: Path,
    feeds: Callable[[int], Iterator[Feed]],
    compare: Callable[[Path, int, Sequence[str]], Measured],
    *,
    keeps: bool,
    report: Callable[[str], None],
) -> Measured:
    """Replace a graph in float by its INT8 form, whose loss is at most a point.

    Args:
        path: File of the graph.
        feeds: Returns inputs of up to a number of training samples.
        compare: Measures a file, with the number of its INT8 layers and those kept in float.
        keeps: Leave the worst layers in float, twice as many each time, until the loss holds.
        report: Prints a line of progress.

    Raises:
        ValueError: The loss is larger; the message names the layers that break.
    """
    source = onnx.load(path)
    labels = network_layers(source)
    if not labels:
        raise ValueError("int8=true finds no convolution or linear layer in the network")
    order: list[tuple[str, float]] = []
    float_nodes: list[str] = []
    trials: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        target = Path(folder) / path.name
        while True:
            names = [name for name in labels if name not in float_nodes]
            report(f"{path.name}: {len(names)} of {len(labels)} layers in INT8")
            quantise(path, target, feeds(CALIBRATED), names)
            result = compare(target, len(names), [labels[name] for name in float_nodes])
            report(f"{path.name}: {result.sentence()}")
            loss = {name: getattr(result, name) for name in ("layers", "loss", "low", "high")}
            trials.append(loss)
            if result.verdict != "more than 1 point":
                break
            if not order:
                worst = cosines(path, target, feeds(COMPARED))
                order = sorted(worst.items(), key=lambda item: item[1])
            if not keeps or len(float_nodes) == len(order) - 1:
                raise ValueError(refusal(result, [(labels[n], c) for n, c in order], keeps=keeps))
            count = min(max(1, 2 * len(float_nodes)), len(order) - 1)
            float_nodes = [name for name, _ in order[:count]]
        result = replace(result, trials=tuple(trials))
        model = onnx.load(target)
        del model.metadata_props[:]  # onnxruntime adds texts of its own
        model.metadata_props.extend(source.metadata_props)
        entry = model.metadata_props.add()
        entry.key, entry.value = "int8", json.dumps(asdict(result))
        onnx.save(model, target)
        target.replace(path)
    report(f"{path.name}: INT8 {result.remark()}")
    return result


def refusal(result: Measured, order: Sequence[tuple[str, float]], *, keeps: bool) -> str:
    """Return the message about a graph that loses too much, with its worst layers."""
    worst = ", ".join(f"{label} {cosine:.3f}" for label, cosine in order[:SHOWN])
    remedy = "" if keeps else "; int8.keep=auto leaves such layers in float"
    tried = f", with {len(result.float_layers)} layers in float" if result.float_layers else ""
    return (
        f"{result.sentence()}{tried}; not exported. Layers that break, by the cosine of their "
        f"outputs, worst first: {worst}{remedy}"
    )


def readme_lines(result: Measured) -> list[str]:
    """Return the paragraph of a README about the INT8 graph."""
    return [
        "",
        f"In INT8: {result.sentence()}. Verdict: {result.remark()}. Activations are bytes with "
        f"ranges of {CALIBRATED} training samples, weights bytes per output channel; what stands "
        "before and after the network is in float. Processors without 8-bit dot products (AVX512 "
        "VNNI, AVX VNNI) may saturate sums and answer otherwise.",
    ]


def settings(options: Mapping[str, str]) -> tuple[bool, bool]:
    """Return whether a request asks for INT8, and for layers in float.

    Raises:
        ValueError: int8.keep without int8=true.
    """
    is_asked, keeps = options.get("int8") == "true", options.get("int8.keep") == "auto"
    if keeps and not is_asked:
        raise ValueError("int8.keep=auto belongs to int8=true; pass both")
    return is_asked, keeps
