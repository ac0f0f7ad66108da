"""Parameters and multiply-adds of whole detectors and segmentors, per part.

As in the papers' tools, one image passes through everything that a test runs. The second stage sees
1000 proposals, and 100 boxes get masks, in each stage of a cascade. Auxiliary heads only count
parameters. RoI pooling and NMS count as 0.

Source: MMDetection 2's and 3's tools/analysis_tools/get_flops.py with forward_dummy (1000 boxes, of
which 100 get masks), MMSegmentation's of the same name.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from backbones import create_backbone
from backbones.analysis.counting import count_macs, count_parameters
from heads.toolkits.toolkit import ToolkitModel
from tasks.engine.family import find_family, imported
from tasks.engine.instantiate import build
from tools.cli.nested_config import deep_merge
from tools.cli.paths import CONFIGS
from tools.cli.yaml_files import read_yaml

PROPOSALS, MASKED = 1000, 100
Part = tuple[str, int, int]  # name, parameters, multiply-adds
Size = tuple[int, int]


def list_dense_heads(task: str) -> list[str]:
    """List the heads of a task by file name."""
    return [
        path.stem
        for path in sorted((CONFIGS / "head").glob("*.yaml"))
        if task in _read(path)["_tasks_"]
    ]


def head_config(task: str, head: str, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the config of a head.

    Args:
        task: Name of the family.
        head: Its name.
        changes: Nested values that override the file's.

    Raises:
        ValueError: The head is unknown or for another task.
    """
    heads = list_dense_heads(task)
    if head not in heads:
        raise ValueError(f"head={head} is not for task={task}; pass one of {', '.join(heads)}")
    content = _read(CONFIGS / "head" / f"{head}.yaml")
    content.pop("_tasks_")
    return deep_merge(content, changes or {})


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = read_yaml(path)
    return content


@functools.cache
def count_dense_parts(
    name: str, options: str, task: str, head: str, changes: str, classes: int, size: Size, rule: str
) -> list[Part]:
    """Count the parameters and multiply-adds of every part of a detector or segmentor.

    Args:
        name: Name of the backbone.
        options: Options of the backbone, as JSON.
        task: Name of the family.
        head: Name of the head.
        changes: Overrides of the head's config, as JSON.
        classes: Number of classes.
        size: (H, W) of the image.
        rule: "macs" or "torchprofile".

    Raises:
        ValueError: Another rule, or a model with unknown parts.
    """
    if rule == "fvcore":
        raise ValueError(
            "rule=fvcore only counts whole models, but this one is counted per part; pass rule=macs"
        )
    config = {"head": head_config(task, head, json.loads(changes))}
    # Heads with queries read values; all others only need shapes.
    device = "cpu" if _has_queries(config["head"]) else "meta"
    with torch.device(device):
        backbone = create_backbone(name, dense=True, **json.loads(options))
        network = build(config["head"], "head", backbone=backbone, num_classes=classes)
    with torch.device(device), torch.no_grad():
        counted = find_family(task).counted
        assert counted is not None
        return list(imported(counted.parts, __name__)(network.eval(), size, rule))


def _has_queries(head: Mapping[str, Any]) -> bool:
    return any(word in str(head["base"]) for word in ("dino", "detr", "former"))


def parts_of(network: ToolkitModel, size: Size, rule: str) -> Iterator[Part]:
    """Yield the parts of a model of the MM toolkits."""
    model = network.model
    counted: set[nn.Parameter] = set()

    def part(name: str, modules: Sequence[nn.Module], run: Callable[[], object]) -> Part:
        # Shared parameters are counted once, in the part that comes first.
        sizes = {p: p.numel() for module in modules for p in module.parameters()}
        total = sum(number for p, number in sizes.items() if p not in counted)
        counted.update(sizes)
        return name, total, count_macs(lambda _: run(), size, rule)

    images = torch.zeros(1, 3, *size)
    maps: tuple[Tensor, ...] = model.backbone(images)
    yield part("backbone", [model.backbone], lambda: model.backbone(images))
    if getattr(model, "with_neck", False):
        neck, before = model.neck, maps
        yield part("neck", [neck], lambda: neck(before))
        maps = neck(before)
    for name, modules, run in _find_heads(model, maps, size):
        yield part(name, modules, run)
    rest = count_parameters(model) - sum(p.numel() for p in counted)
    if rest:
        yield "others", rest, 0


def _find_heads(
    model: Any, maps: tuple[Tensor, ...], size: Size
) -> Iterator[tuple[str, list[nn.Module], Callable[[], object]]]:
    """Yield name, modules and forward pass of each part behind the neck."""
    if hasattr(model, "decode_head"):
        head = model.decode_head
        sample = _make_sample("mmseg", size)
        masks = hasattr(head, "pixel_decoder")
        yield "decode head", [head], lambda: head(maps, [sample]) if masks else head(maps)
        if getattr(model, "with_auxiliary_head", False):
            yield "auxiliary head (training)", [model.auxiliary_head], lambda: None
    elif hasattr(model, "roi_head"):
        yield "rpn head", [model.rpn_head], lambda: model.rpn_head(maps)
        yield from _second_stage(model.roi_head)
    elif hasattr(model, "forward_transformer"):
        sample = _make_sample("mmdet", size)
        inside = [getattr(model, name) for name in ("encoder", "decoder")]
        states = model.forward_transformer(maps, [sample])
        yield "transformer", inside, lambda: model.forward_transformer(maps, [sample])
        # Its layers also predict inside the transformer if a decoder refines boxes.
        yield "bbox head", [model.bbox_head], lambda: model.bbox_head(**states)
    elif hasattr(model, "bbox_head"):
        yield "bbox head", [model.bbox_head], lambda: model.bbox_head(maps)
    else:
        raise ValueError(f"complexity.py does not know the parts of {type(model).__name__}")


def _second_stage(
    roi_head: Any,
) -> Iterator[tuple[str, list[nn.Module], Callable[[], object]]]:
    for kind, number in (("bbox", PROPOSALS), ("mask", MASKED)):
        if not getattr(roi_head, f"with_{kind}"):
            continue
        heads, extractors = (
            list(modules) if isinstance(modules, nn.ModuleList) else [modules]
            for modules in (getattr(roi_head, f"{kind}_head"), _extractor(roi_head, kind))
        )  # type: tuple[list[Any], list[Any]]
        extractors *= len(heads) // len(extractors)
        regions = [
            torch.zeros(number, extractor.out_channels, *extractor.roi_layers[0].output_size)
            for extractor in extractors
        ]
        pairs = list(zip(heads, regions, strict=True))
        yield f"{kind} head", heads, lambda pairs=pairs: [head(x) for head, x in pairs]  # type: ignore[misc]


def _extractor(roi_head: Any, kind: str) -> Any:
    shared = kind == "mask" and roi_head.share_roi_extractor
    return roi_head.bbox_roi_extractor if shared else getattr(roi_head, f"{kind}_roi_extractor")


def _make_sample(toolkit: str, size: Size) -> Any:
    import importlib

    kind = {"mmdet": "DetDataSample", "mmseg": "SegDataSample"}[toolkit]
    sample = getattr(importlib.import_module(f"{toolkit}.structures"), kind)()
    sample.set_metainfo({"img_shape": size, "batch_input_shape": size, "pad_shape": size})
    return sample
