"""To torch.export: programs that run where torch is, without our code (``.pt2``)."""

from __future__ import annotations

import io
import json
from pathlib import Path

import torch

from tools.exporters import ExportRequest, check_equal
from tools.exporters.class_lists import NAMES, write_names
from tools.exporters.networks import names_of, outputs_of, parts_of
from tools.exporters.tracing import describe, inference_form, trace

USE = """import torch

program = torch.export.load("{file}").module()
outputs = program(images)  # (B, 3, H, W) in float32, normalised as in training
"""
CLASSES = """The program holds the names of its classes, in the order of its outputs, as
`class_names.json` does:

```python
extra = {"class_names.json": ""}
torch.export.load("classifier.pt2", extra_files=extra)
names = extra["class_names.json"]  # a JSON list
```"""


def export(request: ExportRequest) -> list[Path]:
    """Write one program per part of the network, load each and compare on several sizes.

    Raises:
        ValueError: A network that cannot be recorded, or other outputs; says where.
    """
    files, notes = [], []
    parts = parts_of(request)
    names = names_of(request, parts)
    for part, network in parts.items():
        path = request.folder / f"{part}.pt2"
        request.say(f"{path.name}: recording the network as a graph")
        graph = trace(inference_form(network), request)
        request.say(
            f"{path.name}: writing and comparing {len(graph.program.graph.nodes)} operations"
        )
        extra = {NAMES: json.dumps(list(names))} if names and part == "classifier" else {}
        program = io.BytesIO()  # torch's own writer aborts the process on a full disk
        torch.export.save(graph.program, program, extra_files=extra)
        path.write_bytes(program.getvalue())
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
    files += write_names(request.folder, names)
    return [*files, describe(request, "torch.export", USE, notes, CLASSES if names else "")]
