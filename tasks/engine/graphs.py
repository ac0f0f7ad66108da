"""Description of a family's whole network as one graph, which tools/export.py records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

# Name, minimum and maximum of each free axis of the inputs; None leaves the maximum open.
Axes = Mapping[int, tuple[str, int, int | None]]


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
