"""To torch.export: programs that run where torch is, without our code (``.pt2``)."""

from __future__ import annotations

from pathlib import Path

import torch

from tools.exporters import ExportRequest, check_equal
from tools.exporters.networks import outputs_of, parts_of
from tools.exporters.tracing import describe, inference_form, trace

USE = """import torch

program = torch.export.load("{file}").module()
outputs = program(images)  # (B, 3, H, W) in float32, normalised as in training
"""


def export(request: ExportRequest) -> list[Path]:
    """Write one program per part of the network, load each and compare on several sizes.

    Raises:
        ValueError: A network that cannot be recorded, or other outputs; says where.
    """
    files, notes = [], []
    for part, network in parts_of(request).items():
        path = request.folder / f"{part}.pt2"
        request.say(f"{path.name}: recording the network as a graph")
        graph = trace(inference_form(network), request)
        request.say(
            f"{path.name}: writing and comparing {len(graph.program.graph.nodes)} operations"
        )
        torch.export.save(graph.program, path)
        loaded = torch.export.load(path).module()
        for batch, *size in graph.sizes(request.image_size):
            images = request.images(batch, (size[0], size[1]))
            with torch.inference_mode():
                found = loaded(images)
                check_equal(
                    f"{path.name} at {batch}x3x{size[0]}x{size[1]}",
                    outputs_of(network, images),
                    [found] if isinstance(found, torch.Tensor) else list(found),
                )
        files.append(path)
        notes.append((path.name, graph))
    return [*files, describe(request, "torch.export", USE, notes)]
