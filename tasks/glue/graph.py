"""A text network as one graph: ``tokens``, ``segments`` and ``mask`` (B, L) to ``logits``.

Batch and length are free. The tokenizer's files lie beside it, and the classes are facts of the
file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tasks.engine.graphs import NetworkGraph


def describe_graph(task: Any, network: Any, folder: Path, label: str) -> NetworkGraph:
    """Return the graph of a task's encoder and head, with the files of its tokenizer.

    Raises:
        ValueError: The network mixes the texts of each length apart, or reads pairs in both orders.
    """
    names = [name for name, block in network.backbone.blocks.named_children() if block.by_length]
    if names:
        raise ValueError(
            f"{label} mixes the texts of each length apart, since a mixer of its blocks reads "
            "padding; a graph cannot do so, so export a network with other mixers, such as afbo "
            "or the host's own attention"
        )
    if getattr(task.data, "swaps", False):
        raise ValueError(
            "a graph takes a pair in one order, but this run adds both (data.both_orders=true)"
        )
    tokenizer, classes, most = task.data.tokenizer(), list(task.class_names), task.data.max_tokens
    words = network.get_parameter("backbone.words.weight").shape[0]

    def readme(file: str, axes: Sequence[str]) -> str:
        of_classes = f"of the classes {', '.join(classes)}" if classes else ""
        return (
            f"`{file}` takes `tokens`, `segments` and `mask` (B, L), L at most {most}, and "
            f"returns `logits` {of_classes}. The tokenizer's files are beside it.\n\n`segments` "
            "is 0 for the first and 1 for the second text of a pair, `mask` True for tokens and "
            "False for the padding behind them.\n"
        )

    return NetworkGraph(
        network,
        name="texts",
        inputs=("tokens", "segments", "mask"),
        output="logits",
        axes=({0: ("batch", 1, None), 1: ("length", 3, most)},),
        trials=lambda axes: _trials(most, words),
        entry="texts",
        facts={
            "classes": classes,
            "max_tokens": most,
            "vocabulary": len(tokenizer),
            "lower": tokenizer.lower,
        },
        readme=readme,
        files=tokenizer.write(folder),
    )


def _trials(most: int, words: int) -> Sequence[tuple[Tensor, ...]]:
    """Return padded texts of several batch sizes and lengths."""
    generator = torch.Generator().manual_seed(0)
    texts = []
    for batch, length in ((2, most - 1), (1, 3), (5, most)):
        tokens = torch.randint(0, words, (batch, length), generator=generator)
        mask = torch.ones(batch, length, dtype=torch.bool)
        mask[-1, max(2, length // 2) :] = False
        texts.append((tokens, (tokens > words // 2).long(), mask))
    return texts
