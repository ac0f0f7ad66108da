"""Export to torch.export: programs that run with torch alone (``.pt2``)."""

from __future__ import annotations

import io
import json
from pathlib import Path

import torch

from tools.exports.class_lists import NAMES
from tools.exports.networks import build_parts, export_class_names, list_outputs
from tools.exports.requests import ExportRequest, check_equal
from tools.exports.tracing import LONG, inference_form, trace
from tools.exports.usage import (
    PREPROCESSING,
    Described,
    output_names,
    preprocessing,
    write_usage,
)


def export(request: ExportRequest) -> list[Path]:
    """Write one program per part of the network, load each and compare on several sizes.

    Raises:
        ValueError: The network cannot be recorded, or outputs differ.
    """
    files: list[Path] = []
    descriptions: list[Described] = []
    parts = build_parts(request)
    names = export_class_names(request, parts)
    for part, network in parts.items():
        path = request.folder / f"{part}.pt2"
        request.report(f"{path.name}: recording the network as a graph {LONG}")
        graph = trace(inference_form(network), request)
        request.report(
            f"{path.name}: writing and comparing {len(graph.program.graph.nodes)} operations"
        )
        prepared = preprocessing(request, network.backbone, graph)
        extra = {PREPROCESSING: json.dumps(prepared)}
        if names and part == "classifier":
            extra[NAMES] = json.dumps(list(names))
        program = io.BytesIO()  # torch's own writer aborts the process on a full disk
        torch.export.save(graph.program, program, extra_files=extra)
        path.write_bytes(program.getvalue())
        loaded = torch.export.load(path).module()
        for batch, *size in graph.sizes(request.image_size):
            images = request.images(batch, (size[0], size[1]))
            with torch.inference_mode():
                outputs = loaded(images)
                check_equal(
                    f"{path.name} at {batch}x3x{size[0]}x{size[1]}",
                    list_outputs(network, images),
                    [outputs] if isinstance(outputs, torch.Tensor) else list(outputs),
                )
        files.append(path)
        descriptions.append(Described(path.name, graph, output_names(network), prepared))
    return [*files, *write_usage(request, descriptions, names)]
