"""Export of text networks: ONNX models and torch.export programs of encoder and head.

The program takes ``tokens``, ``segments`` and ``mask`` (B, L) and returns ``logits``. Batch and
length are free. The tokenizer's files lie beside it, and its metadata has the classes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import tasks
from tools.exports import ExportRequest, check_equal
from tools.exports.checked_files import save_onnx, save_program
from tools.exports.tracing import culprit, inference_form

INPUTS, OUTPUT = ("tokens", "segments", "mask"), "logits"
AXES = {0: "batch", 1: "length"}
TOLERANCE = 1e-4


def to_torch_export(request: ExportRequest) -> list[Path]:
    """Write a torch.export program, load it and compare.

    Raises:
        ValueError: The network cannot be recorded, or outputs differ.
    """
    network, facts, others = _open(request)
    program = _record(network, facts["max_tokens"], request)
    path = request.folder / "texts.pt2"
    loaded = save_program(program, path, facts, "texts")
    for texts in _trials(facts["max_tokens"], facts["vocabulary"]):
        with torch.inference_mode():
            check_equal(_at(path, texts), [network(*texts)], [loaded(*texts)])
    return [path, *others, _readme(request, path, facts)]


def to_onnx(request: ExportRequest) -> list[Path]:
    """Write an ONNX model, run it in onnxruntime and compare.

    Raises:
        ValueError: The network cannot be recorded or written, or outputs differ.
    """
    network, facts, others = _open(request)
    program = _record(network, facts["max_tokens"], request)
    path = request.folder / "texts.onnx"
    session = save_onnx(
        program,
        path,
        facts,
        "texts",
        input_names=list(INPUTS),
        output_names=[OUTPUT],
        dynamic_shapes=(AXES,) * len(INPUTS),
    )
    for texts in _trials(facts["max_tokens"], facts["vocabulary"]):
        with torch.inference_mode():
            wanted = network(*texts)
        given = {name: text.numpy() for name, text in zip(INPUTS, texts, strict=True)}
        # Segments of GPT change nothing, so its graph lacks them.
        known = {one.name for one in session.get_inputs()}
        (found,) = session.run(None, {name: given[name] for name in given.keys() & known})
        check_equal(_at(path, texts), [wanted], [torch.from_numpy(found)], TOLERANCE)
    return [path, *others, _readme(request, path, facts)]


def _open(request: ExportRequest) -> tuple[nn.Module, dict[str, Any], list[Path]]:
    """Return the network, the facts of its inputs, and the files of its tokenizer."""
    if request.ckpt is None:
        raise ValueError("a text network is exported from its run: pass ckpt=<run folder>")
    task: Any = tasks.load(request.ckpt)
    network: Any = inference_form(task.model)
    apart = [name for name, block in network.backbone.blocks.named_children() if block.by_length]
    if apart:
        raise ValueError(
            f"{request.label} mixes the texts of each length apart, since a mixer of its blocks "
            "reads padding; a graph cannot do so, so export a network with other mixers, such as "
            "afbo or the host's own attention"
        )
    if getattr(task.data, "swaps", False):
        raise ValueError(
            "a graph takes a pair in one order, but this run adds both (data.both_orders=true)"
        )
    tokenizer = task.data.tokenizer()
    facts = {
        "classes": list(task.class_names),
        "max_tokens": task.data.max_tokens,
        "vocabulary": len(tokenizer),
        "lower": tokenizer.lower,
    }
    return network, facts, tokenizer.write(request.folder)


def _record(network: nn.Module, most: int, request: ExportRequest) -> ExportedProgram:
    """Record the network with a free batch and length."""
    # Named axes must be proved free; if torch's algebra cannot do so, the runs decide.
    error: Exception | None = None
    texts = _trials(most, network.get_parameter("backbone.words.weight").shape[0])
    for named in (True, False):
        batch: Any = Dim("batch", min=1) if named else Dim.AUTO(min=1)
        length: Any = Dim("length", min=3, max=most) if named else Dim.AUTO(min=3, max=most)
        try:
            with torch.no_grad():
                shapes = ({0: batch, 1: length},) * len(INPUTS)
                program = torch.export.export(network, texts[0], dynamic_shapes=shapes)
                run = program.module()
                for one in texts:
                    run(*one)
            return program
        except Exception as failed:  # torch.export raises any error of the traced code
            error = failed
    assert error is not None
    why = culprit(network, error)
    raise ValueError(f"{request.label} cannot be recorded as a graph: {why}") from error


def _trials(most: int, words: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return padded texts of several batch sizes and lengths."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for batch, length in ((2, most - 1), (1, 3), (5, most)):
        tokens = torch.randint(0, words, (batch, length), generator=generator)
        mask = torch.ones(batch, length, dtype=torch.bool)
        mask[-1, max(2, length // 2) :] = False
        found.append((tokens, (tokens > words // 2).long(), mask))
    return found


def _at(path: Path, texts: tuple[Tensor, ...]) -> str:
    return f"{path.name} at {'x'.join(map(str, texts[0].shape))}"


def _readme(request: ExportRequest, path: Path, facts: dict[str, Any]) -> Path:
    file = request.folder / "README.md"
    classes = f"of the classes {', '.join(facts['classes'])}" if facts["classes"] else ""
    file.write_text(
        f"# {request.label}\n\n`{path.name}` takes `tokens`, `segments` and `mask` (B, L), L at "
        f"most {facts['max_tokens']}, and returns `{OUTPUT}` {classes}. The tokenizer's "
        "files are beside it.\n\n`segments` is 0 for the first and 1 for the second text of a "
        "pair, `mask` True for tokens and False for the padding behind them.\n"
    )
    return file
