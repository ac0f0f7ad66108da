"""Parameters and multiply-adds of whole detectors and segmentors, part by part.

As the papers' tools do, one image is counted through everything that a test runs: of two stages the
second one sees 1000 proposals, and 100 boxes get masks, in each stage of a cascade; auxiliary heads
count parameters alone. Pooling of regions and NMS multiply nothing here.

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
from tasks.engine.instantiate import build
from tools.cli.nested_config import merge
from tools.cli.paths import CONFIGS
from tools.cli.yaml_files import read_yaml

HEADS = CONFIGS / "head"
PROPOSALS, MASKED = 1000, 100
# Classes of COCO and ADE20K, and the size that papers count at, by task.
CLASSES = {"detection": 80, "segmentation": 150}
SIZES = {"detection": "800x1280", "segmentation": "512x2048"}
HEADS_BY_TASK = {"detection": "mask_rcnn", "segmentation": "upernet"}
Part = tuple[str, int, int]  # name, parameters, multiply-adds
Size = tuple[int, int]


def dense_heads(task: str) -> list[str]:
    """The heads of a task, by the names of their files."""
    return [path.stem for path in sorted(HEADS.glob("*.yaml")) if task in _read(path)["_tasks_"]]


def head_config(task: str, head: str, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The config of a head.

    Args:
        task: "detection" or "segmentation".
        head: Its name.
        changes: Values in place of the file's, nested.

    Raises:
        ValueError: The task has no such head.
    """
    known = dense_heads(task)
    if head not in known:
        raise ValueError(f"task={task} has no head={head}; it has {', '.join(known)}")
    content = _read(HEADS / f"{head}.yaml")
    content.pop("_tasks_")
    return merge(content, changes or {})


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = read_yaml(path)
    return content


@functools.cache
def dense_parts(
    name: str, options: str, task: str, head: str, changes: str, classes: int, size: Size, rule: str
) -> list[Part]:
    """Every part of a detector or segmentor with its parameters and multiply-adds.

    Args:
        name: Of the backbone.
        options: Of the backbone, as JSON.
        task: "detection" or "segmentation".
        head: Name of the head.
        changes: Of the head's config, as JSON.
        classes: Their number.
        size: (H, W) of the image.
        rule: "macs" or "torchprofile".

    Raises:
        ValueError: Another rule, or a model whose parts are not known here.
    """
    if rule == "fvcore":
        raise ValueError(
            "rule=fvcore runs the whole model, which is counted by its parts; pass rule=macs"
        )
    config = {"head": head_config(task, head, json.loads(changes))}
    # Heads with queries look at values; all others are counted by their shapes.
    device = "cpu" if _has_queries(config["head"]) else "meta"
    with torch.device(device):
        backbone = create_backbone(name, dense=True, **json.loads(options))
        whole = build(config, "head", backbone=backbone, num_classes=classes)
    with torch.device(device), torch.no_grad():
        return list(_parts(whole.eval(), size, rule))


def _has_queries(head: Mapping[str, Any]) -> bool:
    return any(word in str(head["base"]) for word in ("dino", "detr", "former"))


def _parts(whole: ToolkitModel, size: Size, rule: str) -> Iterator[Part]:
    model = whole.model
    counted: set[nn.Parameter] = set()

    def part(name: str, modules: Sequence[nn.Module], run: Callable[[], object]) -> Part:
        # The same parameters are counted once, where they come first.
        found = {p: p.numel() for module in modules for p in module.parameters()}
        own = sum(number for p, number in found.items() if p not in counted)
        counted.update(found)
        return name, own, count_macs(lambda _: run(), size, rule)

    images = torch.zeros(1, 3, *size)
    maps: tuple[Tensor, ...] = model.backbone(images)
    yield part("backbone", [model.backbone], lambda: model.backbone(images))
    if getattr(model, "with_neck", False):
        neck, before = model.neck, maps
        yield part("neck", [neck], lambda: neck(before))
        maps = neck(before)
    for name, modules, run in _heads(model, maps, size):
        yield part(name, modules, run)
    rest = count_parameters(model) - sum(p.numel() for p in counted)
    if rest:
        yield "others", rest, 0


def _heads(
    model: Any, maps: tuple[Tensor, ...], size: Size
) -> Iterator[tuple[str, list[nn.Module], Callable[[], object]]]:
    """Name, modules and forward pass of everything behind the neck."""
    if hasattr(model, "decode_head"):
        head = model.decode_head
        sample = _sample("mmseg", size)
        masks = hasattr(head, "pixel_decoder")
        yield "decode head", [head], lambda: head(maps, [sample]) if masks else head(maps)
        if getattr(model, "with_auxiliary_head", False):
            yield "auxiliary head (training)", [model.auxiliary_head], lambda: None
    elif hasattr(model, "roi_head"):
        yield "rpn head", [model.rpn_head], lambda: model.rpn_head(maps)
        yield from _second_stage(model.roi_head)
    elif hasattr(model, "forward_transformer"):
        sample = _sample("mmdet", size)
        inside = [getattr(model, name) for name in ("encoder", "decoder")]
        states = model.forward_transformer(maps, [sample])
        yield "transformer", inside, lambda: model.forward_transformer(maps, [sample])
        # Its layers predict in the transformer, too, where a decoder refines boxes.
        yield "bbox head", [model.bbox_head], lambda: model.bbox_head(**states)
    elif hasattr(model, "bbox_head"):
        yield "bbox head", [model.bbox_head], lambda: model.bbox_head(maps)
    else:
        raise ValueError(f"the parts of {type(model).__name__} are not known to complexity.py")


def _second_stage(
    roi_head: Any,
) -> Iterator[tuple[str, list[nn.Module], Callable[[], object]]]:
    for kind, number in (("bbox", PROPOSALS), ("mask", MASKED)):
        if not getattr(roi_head, f"with_{kind}"):
            continue
        heads, extractors = (
            list(found) if isinstance(found, nn.ModuleList) else [found]
            for found in (getattr(roi_head, f"{kind}_head"), _extractor(roi_head, kind))
        )  # type: tuple[list[Any], list[Any]]
        extractors *= len(heads) // len(extractors)
        regions = [
            torch.zeros(number, one.out_channels, *one.roi_layers[0].output_size)
            for one in extractors
        ]
        pairs = list(zip(heads, regions, strict=True))
        yield f"{kind} head", heads, lambda pairs=pairs: [head(x) for head, x in pairs]  # type: ignore[misc]


def _extractor(roi_head: Any, kind: str) -> Any:
    shared = kind == "mask" and roi_head.share_roi_extractor
    return roi_head.bbox_roi_extractor if shared else getattr(roi_head, f"{kind}_roi_extractor")


def _sample(toolkit: str, size: Size) -> Any:
    import importlib

    kind = {"mmdet": "DetDataSample", "mmseg": "SegDataSample"}[toolkit]
    sample = getattr(importlib.import_module(f"{toolkit}.structures"), kind)()
    sample.set_metainfo({"img_shape": size, "batch_input_shape": size, "pad_shape": size})
    return sample
