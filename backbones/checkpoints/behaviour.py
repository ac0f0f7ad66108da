"""Fingerprint of a network by behaviour, which an edit of its equations changes.

A network of the same options, with weights drawn from a seed, answers a small input on the CPU in
float64. So the fingerprint depends on code and options alone: on neither trained weights nor their
precision, device, average or distribution. Names of variables and places of files leave it alike.
"""

from __future__ import annotations

import difflib
import logging
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from backbones.base import Backbone
from backbones.checkpoints.earlier_forms import take_recorded_forms
from backbones.checkpoints.equations import FINGERPRINT, SOURCE, START, first_change

SEED = 0
ROOT = Path(__file__).parents[2]
SHOWN, LONGEST = 3, 80  # files in a message, and characters of a line of code
# Options without effect on the function of the weights, with the values for the probed network.
ASIDE = {
    "pretrained": None, "drop_path_rate": 0.0, "grad_checkpointing": False, "frozen_stages": -1,
    "norm_eval": None, "lora": None, "fast": False,
}  # fmt: skip


def fingerprint(
    build: Callable[..., Backbone], options: Mapping[str, Any], record: Mapping[str, Any]
) -> dict[str, list[float]]:
    """Return what a network answers: per block and mixer, in the order of their calls.

    Args:
        build: ``create_backbone``.
        options: Its arguments.
        record: Record of the network, with the forms of its mixers.

    Returns:
        Root mean square and mean product with noise, of each output and of the initial weights.
    """
    with _sandbox():
        backbone = build(**{**options, **ASIDE})
        start = [torch.linalg.vector_norm(p) / p.numel() ** 0.5 for p in backbone.parameters()]
        take_recorded_forms(backbone, record)
        backbone.load_state_dict(_drawn_values(backbone), assign=True)
        backbone.double().eval()
        answers: dict[str, list[float]] = {}
        parts = {**backbone.token_mixers(), **backbone.channel_mixers()}
        parts |= {name: backbone.get_submodule(name) for name in backbone.block_names()}
        for name, part in parts.items():
            part.register_forward_hook(partial(_keep, answers, name))
        torch.default_generator.manual_seed(SEED)  # initial weights draw as many as they like
        inputs = backbone.example_inputs()
        _keep(answers, "output", backbone, inputs, backbone(*inputs))
        if not backbone.dense:
            _keep(answers, "embedding", backbone, inputs, backbone.embed(inputs[0][:1]))
        _keep(answers, START, backbone, inputs, start or torch.zeros(1))
    return answers


def describe_change(
    path: str, record: Mapping[str, Any], build: Callable[..., Backbone] | None
) -> str | None:
    """Describe how today's code differs from that which a checkpoint was trained by.

    Args:
        path: The checkpoint.
        record: Its record, which is compared if it holds a fingerprint.
        build: ``create_backbone``.

    Returns:
        None if the code computes the same.
    """
    entry = record.get(FINGERPRINT)
    if not entry or build is None:
        return None
    try:
        ours = fingerprint(build, entry["options"], record)
    except Exception as error:  # options of a file raise errors of all kinds
        return f"{path} was trained by code that builds another network today ({error})"
    return describe_answers(path, entry["answers"], ours)


def describe_answers(
    path: str, file_answers: Mapping[str, list[float]], ours: Mapping[str, list[float]]
) -> str | None:
    """Describe the first difference of a checkpoint's answers from ours, with changed files."""
    name = first_change({key: file_answers[key] for key in file_answers if key != START}, ours)
    if name is None:
        return None
    folder = Path(path).absolute().parent.parent / SOURCE
    files = list(_changed_files(folder)) or [f"no file in {folder} differs"]
    more = f"; and {len(files) - SHOWN} more" if len(files) > SHOWN else ""
    return (
        f"{path} was trained by other code: {name} computes another function today "
        f"({'; '.join(files[:SHOWN])}{more})"
    )


def _changed_files(folder: Path) -> Iterator[str]:
    """Describe the files that a run has kept and that have another text today."""
    for copy in sorted(folder.rglob("*.py")):
        name = copy.relative_to(folder)
        if not (copy.is_file() and name.stem.isidentifier()):  # or a later text of a resumed run
            continue
        module = sys.modules.get(".".join(name.with_suffix("").parts).removesuffix(".__init__"))
        file = Path(getattr(module, "__file__", None) or ROOT / name)
        if not file.is_file():
            yield f"{name} is gone"
            continue
        lines = [path.read_text(errors="replace").splitlines() for path in (copy, file)]
        if lines[0] != lines[1]:
            yield f"{name}: {_first_lines(*lines)}"


def _first_lines(before: list[str], after: list[str]) -> str:
    differences = list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:]
    was, now = (
        next((line[1:].strip() for line in differences if line[0] == sign), "")[:LONGEST]
        for sign in "-+"
    )
    return f"{was!r} is {now!r} today"


@contextmanager
def _sandbox() -> Iterator[None]:
    """Draw and compute without traces in logs and in the state of random numbers."""
    logger = logging.getLogger("backbones")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with (
            torch.random.fork_rng(devices=[]),
            torch.device("cpu"),
            torch.autocast("cpu", enabled=False),
            torch.no_grad(),
            warnings.catch_warnings(action="ignore"),
        ):
            torch.default_generator.manual_seed(SEED)
            yield
    finally:
        logger.setLevel(level)


def _drawn_values(backbone: Backbone) -> dict[str, Tensor]:
    """Return weights by which activations keep their size; equal blocks share them."""
    generator, blocks = torch.Generator().manual_seed(SEED), backbone.block_names()
    shared: dict[tuple[str, torch.Size], Tensor] = {}
    values = {}
    for name, like in backbone.state_dict().items():
        block = next((block for block in blocks if name.startswith(f"{block}.")), "")
        key = name.removeprefix(block), like.shape
        if key not in shared and like.is_floating_point():
            shared[key] = scaled(name, _noise(like.shape, generator))
        values[name] = shared.get(key, like)
    return values


def _noise(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return noise of variance 1: uniform, as normal noise is rounded by the kind of processor."""
    return 12**0.5 * (torch.rand(shape, generator=generator, dtype=torch.double) - 0.5)


def scaled(name: str, noise: Tensor) -> Tensor:
    """Return noise of variance 1 as weights of this name, by which activations keep their size."""
    if name.endswith("running_var"):
        return 0.5 + noise.square()
    if noise.ndim and noise.numel() > len(noise):
        is_table = noise.ndim not in (2, 4) and "weight" not in name
        return noise / math.sqrt(1 if is_table else noise[0].numel())
    return 0.8 + 0.2 * noise if name.endswith("weight") else 0.3 * noise


def _keep(
    answers: dict[str, list[float]], name: str, part: nn.Module, inputs: Any, outputs: Any
) -> Any:
    """Add the answer of a part to its first call, if it is finite; return outputs of size 1."""
    x = torch.cat([tensor.double().flatten() for tensor in _tensors(outputs)])
    size = x.square().mean().sqrt().item()
    if name not in answers and math.isfinite(size):
        noise = _noise([len(x)], torch.Generator().manual_seed(SEED))
        answers[name] = [size, (x * noise).mean().item()]
    # Products of equal weights would grow from block to block, and rounding with them.
    return outputs / size if size > 1 and isinstance(outputs, Tensor) else outputs


def _tensors(outputs: Any) -> Iterable[Tensor]:
    if isinstance(outputs, Tensor):
        return [outputs]
    return [tensor for part in outputs for tensor in _tensors(part)]
