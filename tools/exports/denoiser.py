"""Export of denoisers: ONNX models and torch.export programs of one step's prediction.

The program takes noisy images or latents (B, C, H, W), times (B,) from 0 to 1000 and labels (B,),
where K stands for an unknown class. The batch is free. The sampler stays with the user; its options
are in the metadata.
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

INPUTS, OUTPUT = ("images", "times", "labels"), "prediction"
TOLERANCE = 1e-4
BATCHES = (2, 1, 5)  # of the comparison


class Step(nn.Module):
    """Prediction of a denoiser as one tensor."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, images: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        """Return the prediction: (B, C, H, W), (B,) and (B,) -> (B, C or 2 C, H, W)."""
        found: Tensor = self.backbone(images, times, labels)[0]
        return found


def to_torch_export(request: ExportRequest) -> list[Path]:
    """Write a torch.export program, load it and compare.

    Raises:
        ValueError: The network cannot be recorded, or outputs differ.
    """
    step, facts = _open(request)
    program = _record(step, facts, request)
    path = request.folder / "denoiser.pt2"
    loaded = save_program(program, path, facts, "sampling")
    for batch in BATCHES:
        given = _inputs(facts, batch)
        with torch.inference_mode():
            check_equal(f"{path.name} at a batch of {batch}", [step(*given)], [loaded(*given)])
    return [path, _readme(request, path, facts)]


def to_onnx(request: ExportRequest) -> list[Path]:
    """Write an ONNX model, run it in onnxruntime and compare.

    Raises:
        ValueError: The network cannot be recorded or written, or outputs differ.
    """
    step, facts = _open(request)
    program = _record(step, facts, request)
    path = request.folder / "denoiser.onnx"
    session = save_onnx(
        program,
        path,
        facts,
        "sampling",
        input_names=INPUTS,
        output_names=[OUTPUT],
        dynamic_shapes=({0: "batch"},) * len(INPUTS),
    )
    for batch in BATCHES:
        given = _inputs(facts, batch)
        with torch.inference_mode():
            wanted = step(*given)
        named = {name: one.numpy() for name, one in zip(INPUTS, given, strict=True)}
        (found,) = session.run(None, named)
        what = f"{path.name} at a batch of {batch}"
        check_equal(what, [wanted], [torch.from_numpy(found)], TOLERANCE)
    return [path, _readme(request, path, facts)]


def _open(request: ExportRequest) -> tuple[Step, dict[str, Any]]:
    """Return the network, and the options of the sampler with shape and classes."""
    if request.ckpt is None:
        raise ValueError("a denoiser is exported from its run: pass ckpt=<run folder>")
    task: Any = tasks.load(request.ckpt)
    network: Any = inference_form(task.model)
    backbone = network.backbone
    shape = [backbone.channels, *backbone.img_size]
    facts = {**network.sampling, "shape": shape, "classes": list(task.class_names)}
    return Step(backbone).eval(), facts


def _record(step: Step, facts: dict[str, Any], request: ExportRequest) -> ExportedProgram:
    batch: Any = {0: Dim("batch", min=1)}
    try:
        with torch.no_grad():
            return torch.export.export(
                step, _inputs(facts, BATCHES[0]), dynamic_shapes=(batch,) * len(INPUTS)
            )
    except Exception as error:  # torch.export raises any error of the traced code
        why = culprit(step, error)
        raise ValueError(f"{request.backbone} cannot be recorded as a graph: {why}") from error


def _inputs(facts: dict[str, Any], batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs for the comparison, the last label unknown."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch, *facts["shape"], generator=generator)
    count = len(facts["classes"])
    labels = torch.arange(count + 1).flip(0)[torch.arange(batch) % (count + 1)]
    return images, torch.linspace(0, 999, batch), labels


def _readme(request: ExportRequest, path: Path, facts: dict[str, Any]) -> Path:
    file = request.folder / "README.md"
    shape = ", ".join(map(str, facts["shape"]))
    count = len(facts["classes"])
    file.write_text(
        f"# {request.label}\n\n`{path.name}` takes noisy `images` (B, {shape}) as float32, `times` "
        f"(B,) from 0 to 1000 as float32 and `labels` (B,) as int64, where {count} is an unknown "
        f"class. It returns `{OUTPUT}`: one step's prediction. The metadata has the options of the "
        "sampler and the names of the classes.\n"
    )
    return file
