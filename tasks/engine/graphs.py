"""Descriptions of a family's whole network as one graph, which tools/export.py records."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from backbones.factory import LEAST_SIDE

# Name, minimum and maximum of each free axis of the inputs; None leaves the maximum open.
Axes = Mapping[int, tuple[str, int, int | None]]
BATCH: Axes = {0: ("batch", 1, None)}
# Of images (B, H, W, C). A graph that is recorded at smaller ones takes these, too.
IMAGE_AXES: Axes = {**BATCH, 1: ("height", LEAST_SIDE, None), 2: ("width", LEAST_SIDE, None)}


@dataclass(frozen=True)
class NetworkGraph:
    """A network as one graph.

    Attributes:
        network: Takes ``inputs`` by position and returns one tensor.
        name: Stem of the written file.
        inputs: Names of the inputs.
        output: Name of the output.
        axes: Axes of every input that may be free, the most first; the first that can be recorded
            is written.
        trials: Function from the free axes to tuples of inputs to compare on; the first is traced.
        entry: Name of ``facts`` in the file.
        facts: What a user needs to call it, as plain values.
        readme: Function from the file's name and the names of free axes to the text below the title
            of its README.
        files: Files that belong to it, such as a tokenizer's.
    """

    network: nn.Module
    name: str
    inputs: Sequence[str]
    output: str
    axes: Sequence[Axes]
    trials: Callable[[Axes], Sequence[tuple[Tensor, ...]]]
    entry: str
    facts: Mapping[str, Any]
    readme: Callable[[str, Sequence[str]], str]
    files: Sequence[Path] = ()


class NotWholeError(ValueError):
    """A run's graph from inputs to answers cannot be made; the message is the reason."""


class WholeGraph(nn.Module, ABC):
    """A run's whole network as one graph, from inputs as decoded to answers.

    A family's class describes it: ``forward`` takes ``inputs`` by position and returns a tensor for
    each of ``outputs``.

    Args:
        task: Task of the run.
        network: Its model in the form for inference.

    Attributes:
        inputs: Names of the inputs.
        outputs: Names of the answers.
        script: File that runs the graph, written beside it as infer.py.
        axes: Axes of the first input that may be free, the most first; the first that can be
            recorded is written.
        flips: Share of the answers that rounding may change, such as a box that overlaps by just
            the limit; 0 for answers that are numbers.
        point: One point of the monitored metric; None for a hundredth of its value.
    """

    inputs: Sequence[str] = ("images",)
    outputs: Sequence[str]
    script: Path
    axes: Sequence[Axes] = (IMAGE_AXES, BATCH)
    flips = 0.0
    point: float | None = 1.0

    def __init__(self, task: Any, network: nn.Module) -> None:
        super().__init__()
        self.network: Any = network

    @abstractmethod
    def feed(self, batch: Any) -> tuple[Tensor, ...]:
        """Return the inputs of a batch as the run's loader gives it, without normalisation."""

    @abstractmethod
    def predictions(self, predicted: Any, answers: Sequence[Tensor]) -> Any:
        """Return the graph's answers in the form of the checkpoint's predictions ``predicted``."""

    @abstractmethod
    def differences(self, predicted: Any, answers: Sequence[Tensor]) -> Tensor:
        """Return by how much each answer differs from the checkpoint's, relative above 1 (n,)."""

    def choices(self, expected: Sequence[Tensor], answers: Sequence[Tensor]) -> Tensor:
        """Return by how much answers that rounding may change differ from the network's (n,)."""
        raise NotImplementedError("a graph with flips compares lists of its own")

    def facts(self, task: Any) -> dict[str, Any]:
        """Return what the file's metadata hold beside that of every run, as plain values."""
        return {}

    def groups(self, batch: Any) -> Sequence[Any]:
        """Divide a batch of the run's loader into batches of inputs of one size."""
        return [batch]

    def prepare(self, task: Any, data: Any) -> None:
        """Give a task what its metrics need of the data module, which has its data."""

    def operators(self) -> dict[Any, Any]:
        """Return the ONNX forms of operators that torch's converter lacks."""
        return {}


def distance(expected: Tensor, answers: Tensor) -> Tensor:
    """Return the differences of numbers, relative to the largest where that is above 1 (n,)."""
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    return ((expected.double() - answers.double()).abs() / scale).flatten()
