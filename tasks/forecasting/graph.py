"""A forecaster as one graph: scaled series (B, L, M) to forecasts.

The names, means and deviations of the variables are facts of the file. The batch is free, and the
number of variables where the network allows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tasks.engine.graphs import Axes, NetworkGraph

BATCH, VARIABLES = {0: ("batch", 1, None)}, {2: ("variables", 1, None)}


def describe_graph(task: Any, network: Any, folder: Path, label: str) -> NetworkGraph:
    """Return the graph of a task's forecaster."""
    length, variables = task.data.lookback, len(task.data.names)
    if network.targets == variables:
        network.targets = None  # all variables, whatever their number
    any_number = network.backbone.any_variables and network.targets is None
    facts = {**task.series_facts, "horizon": network.horizon, "lookback": length}

    def trials(axes: Axes) -> Sequence[tuple[Tensor, ...]]:
        generator = torch.Generator().manual_seed(0)
        numbers = (variables, 1, variables + 4) if 2 in axes else (variables,)
        return [
            (torch.randn(batch, length, count, generator=generator),)
            for batch in (2, 1, 5)
            for count in numbers
        ]

    def readme(file: str, axes: Sequence[str]) -> str:
        return (
            f"`{file}` takes `series` (B, {length}, {variables}) and returns `forecast` "
            f"(B, {network.horizon}, {facts['targets']}). Free axes: {' and '.join(axes)}.\n\n"
            "Scale each variable by its mean and standard deviation in the metadata, and undo it "
            "for the forecast.\n"
        )

    return NetworkGraph(
        network,
        name="forecaster",
        inputs=("series",),
        output="forecast",
        axes=(BATCH | VARIABLES, BATCH) if any_number else (BATCH,),
        trials=trials,
        entry="series",
        facts=facts,
        readme=readme,
    )
