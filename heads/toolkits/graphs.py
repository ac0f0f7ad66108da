"""The toolkits' models as functions of pixels alone, which a graph can hold.

They compute what ``predict`` of a toolkit's model does, without its data samples.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision import ops

from backbones.layers.graph_sizes import crop, missing
from heads.toolkits.toolkit import ToolkitModel

LONGEST = 2**16  # side of an image


def image_groups(batch: Any, *sizes: str) -> list[Any]:
    """Divide a toolkit's batch by the sizes of its images, and by sizes in the samples' facts."""
    groups: dict[Any, list[int]] = {}
    for place, image in enumerate(batch["inputs"]):
        sample = batch["data_samples"][place]
        key = (*image.shape, *(tuple(sample.metainfo[name]) for name in sizes))
        groups.setdefault(key, []).append(place)
    return [
        {name: [values[place] for place in places] for name, values in batch.items()}
        for places in groups.values()
    ]


def image_bytes(batch: Any) -> Tensor:
    """Return a toolkit's images, lists of BGR planes, as bytes (B, H, W, 3) in RGB."""
    return torch.stack(list(batch["inputs"])).flip(1).permute(0, 2, 3, 1).contiguous()


def prepared_facts(task: Any) -> dict[str, Any]:
    """Return the classes, and the rule by which images are resized before the graph."""
    processor = task.model.model.data_preprocessor
    return {
        "classes": list(task.class_names),
        "resize": {"longest": max(task.data.scale), "shortest": min(task.data.scale)},
        "interpolation": "bilinear as by OpenCV",
        "mean": processor.mean.flatten().tolist(),
        "std": processor.std.flatten().tolist(),
    }


class Preprocessed(nn.Module):
    """Normalisation and padding of a toolkit's data preprocessor.

    Shape: (B, H, W, 3) of bytes in RGB -> (B, 3, H', W') with sides that the network divides.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, processor: Any, divisor: int) -> None:
        super().__init__()
        self.register_buffer("mean", processor.mean.clone(), persistent=False)
        self.register_buffer("std", processor.std.clone(), persistent=False)
        # Batches of the toolkits have the order BGR, which the preprocessor turns.
        self.reads_bgr = not getattr(processor, "_channel_conversion", True)
        self.divisor, self.value = divisor, float(processor.pad_value)

    def forward(self, images: Tensor) -> Tensor:
        """Prepare images (B, H, W, 3)."""
        planes = images.permute(0, 3, 1, 2).float()
        planes = ((planes.flip(1) if self.reads_bgr else planes) - self.mean) / self.std
        below, right = (missing(side, self.divisor) for side in images.shape[1:3])
        return F.pad(planes, (0, right, 0, below), value=self.value)


class LabelMaps(nn.Module):
    """A segmentor of MMSegmentation: labels and their probabilities at the original size.

    Args:
        segmentor: The segmentor.

    Raises:
        ValueError: It predicts by windows, or its head by rules of its own.
    """

    def __init__(self, segmentor: ToolkitModel) -> None:
        from mmseg.models.decode_heads.decode_head import BaseDecodeHead

        super().__init__()
        self.model = model = segmentor.model
        head, config = model.decode_head, model.test_cfg
        if config.get("mode") == "slide":
            raise ValueError("it predicts in sliding windows (head.test_crop)")
        kind, usual = type(head), BaseDecodeHead
        if not isinstance(head, BaseDecodeHead) or (kind.predict, kind.predict_by_feat) != (
            usual.predict,
            usual.predict_by_feat,
        ):
            raise ValueError(f"{kind.__name__} predicts by rules of its own")
        self.processor = Preprocessed(model.data_preprocessor, segmentor.backbone.size_divisor)

    def forward(self, images: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
        """Label images (B, H, W, 3) at ``size`` (2,), the original height and width.

        Returns:
            Labels (B, h, w) of bytes, and the probability of each (B, h, w).
        """
        padded = self.processor(images)
        how = {"mode": "bilinear", "align_corners": self.model.align_corners}
        logits = self.model.decode_head(self.model.extract_feat(padded))
        logits = F.interpolate(logits, padded.shape[2:], **how)
        logits = crop(logits, images.shape[1], images.shape[2])
        height, width = _sides(size)
        logits = F.interpolate(logits, (height, width), **how)
        best = logits.softmax(1).max(1)
        return best.indices.to(torch.uint8), best.values


@torch.library.custom_op("mixerlab::kept_boxes", mutates_args=())
def kept_boxes(boxes: Tensor, scores: Tensor, overlap: float, least: float, most: int) -> Tensor:
    """Return 1 for the boxes that non-maximum suppression keeps, else 0 (B, N).

    Args:
        boxes: (B, N, 4).
        scores: (B, N).
        overlap: Most intersection over union of two kept boxes.
        least: Scores of kept boxes are above it.
        most: Most boxes to keep per image.
    """
    marks = torch.zeros_like(scores)
    for image, (corners, values) in enumerate(zip(boxes, scores, strict=True)):
        places = torch.nonzero(values > least).flatten()
        order = ops.nms(corners[places], values[places], float(np.float32(overlap)))
        marks[image, places[order[:most]]] = 1
    return marks


@kept_boxes.register_fake
def _kept_boxes_shape(
    boxes: Tensor, scores: Tensor, overlap: float, least: float, most: int
) -> Tensor:
    return torch.empty_like(scores)


def kept_boxes_in_onnx(boxes: Any, scores: Any, overlap: float, least: float, most: int) -> Any:
    """Write ``kept_boxes`` as ONNX's NonMaxSuppression."""
    from onnxscript import opset18

    op: Any = opset18
    limits = (op.Constant(value_floats=[value]) for value in (overlap, least))
    classes = op.Unsqueeze(scores, op.Constant(value_ints=[1]))
    rows = op.NonMaxSuppression(boxes, classes, op.Constant(value_ints=[most]), *limits)
    places = op.Gather(rows, op.Constant(value_ints=[0, 2]), axis=1)  # image and box
    ones = op.Expand(op.Constant(value_float=1.0), op.Shape(rows, start=0, end=1))
    zeros = op.Expand(op.Constant(value_float=0.0), op.Shape(scores))
    return op.ScatterND(zeros, places, ones)


def detections_of(detector: ToolkitModel) -> Detections:
    """Return a detector of MMDetection as a function of pixels.

    Raises:
        ValueError: It predicts by rules of its own.
    """
    kind = RegionDetections if getattr(detector.model, "roi_head", None) else PlaceDetections
    return kind(detector)


class Detections(nn.Module):
    """A detector of MMDetection from pixels to boxes.

    Args:
        detector: The detector.

    Attributes:
        least: Scores of detections are above it.
        most: Detections per image.
        with_masks: True if it returns masks as well.
    """

    def __init__(self, detector: ToolkitModel, config: Any) -> None:
        super().__init__()
        self.model = model = detector.model
        if config.nms.get("type", "nms") != "nms" or config.nms.get("class_agnostic"):
            raise ValueError(f"its suppression is {config.nms}; a graph has nms per class")
        self.least, self.most = float(config.get("score_thr", 0)), int(config.max_per_img)
        self.config, self.with_masks = config, bool(getattr(model, "with_mask", False))
        divisor = getattr(model.data_preprocessor, "pad_size_divisor", 1)
        self.processor = Preprocessed(model.data_preprocessor, divisor)

    def forward(self, images: Tensor, size: Tensor) -> tuple[Tensor, ...]:
        """Detect objects in images (B, H, W, 3) of the original ``size`` (2,), height and width.

        Returns:
            Labels (B, N), scores (B, N) and boxes (B, N, 4) of left, top, right and bottom in
            pixels of the original image, the surest first; places without an object have label -1
            and score 0. With masks also these (B, N, h, w) at the original size.
        """
        maps = self.model.extract_feat(self.processor(images))
        boxes, scores, labels = self.detect(maps, images.shape[1:3])
        factors = [size[1] / images.shape[2], size[0] / images.shape[1]]
        answered_labels = torch.where(scores > 0, labels, torch.full_like(labels, -1))
        original = boxes * torch.stack(factors * 2)
        answers = answered_labels, scores, original
        if not self.with_masks:
            return answers
        return (
            *answers,
            self.masks(maps, boxes, labels, original, size) & (scores > 0)[..., None, None],
        )

    def detect(self, maps: Any, size: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return boxes (B, N, 4) in pixels of the resized images, scores and labels (B, N)."""
        raise NotImplementedError

    def masks(
        self, maps: Any, boxes: Tensor, labels: Tensor, original: Tensor, size: Tensor
    ) -> Tensor:
        """Return the masks (B, N, h, w) of detections, whose boxes are in pixels of both sizes."""
        raise NotImplementedError


class PlaceDetections(Detections):
    """A detector with one stage.

    Per level the surest pairs of a place and a class above the threshold are decoded; of those of a
    class that overlap the surest is kept.
    """

    def __init__(self, detector: ToolkitModel) -> None:
        from mmdet.models.dense_heads.base_dense_head import BaseDenseHead

        head: Any = getattr(detector.model, "bbox_head", None)
        names = ("predict", "predict_by_feat", "_predict_by_feat_single", "_bbox_post_process")
        if not isinstance(head, BaseDenseHead) or not _inherits(head, BaseDenseHead, *names):
            raise ValueError(f"{type(detector.model).__name__} predicts by rules of its own")
        super().__init__(detector, detector.model.test_cfg)
        self.head = head

    def detect(self, maps: Any, size: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Decode and suppress."""
        boxes, scores, labels, _ = _candidates(self.head, self.config, maps, size)
        return _suppressed(boxes, scores, labels, self.config.nms.iou_threshold, self.most)


class RegionDetections(Detections):
    """A detector with regions: Faster, Mask and Cascade R-CNN."""

    def __init__(self, detector: ToolkitModel) -> None:
        from mmdet.models.dense_heads.rpn_head import RPNHead
        from mmdet.models.roi_heads import CascadeRoIHead, StandardRoIHead
        from mmdet.models.roi_heads.bbox_heads.bbox_head import BBoxHead
        from mmdet.models.roi_heads.mask_heads import FCNMaskHead
        from mmdet.models.roi_heads.roi_extractors import SingleRoIExtractor

        model = detector.model
        region, names = model.roi_head, ("predict_by_feat", "_predict_by_feat_single")
        changes = [
            type(region) not in (StandardRoIHead, CascadeRoIHead),
            type(getattr(model, "rpn_head", None)) is not RPNHead,
            getattr(region, "with_shared_head", False),
        ]
        parts = [
            (BBoxHead, "bbox_head"),
            *([(FCNMaskHead, "mask_head")] if getattr(region, "with_mask", False) else []),
        ]
        for base, name in parts:
            for head in _stages(getattr(region, name, None)):
                changes.append(not isinstance(head, base) or not _inherits(head, base, *names))
            for extractor in _stages(getattr(region, name.replace("head", "roi_extractor"), None)):
                changes.append(type(extractor) is not SingleRoIExtractor)
        if any(changes):
            raise ValueError(f"{type(model).__name__} predicts by rules of its own")
        super().__init__(detector, model.test_cfg.rcnn)
        self.proposals, self.region = model.test_cfg.rpn, region

    def detect(self, maps: Any, size: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Propose regions, classify and refine them, and suppress."""
        rules = self.proposals
        boxes, scores, _, levels = _candidates(self.model.rpn_head, rules, maps, size)
        rois, certainty, _ = _suppressed(
            boxes, scores, levels, rules.nms.iou_threshold, rules.max_per_img
        )
        batch, count = rois.shape[:2]
        heads = _stages(self.region.bbox_head)
        logits = []
        for head, extractor in zip(heads, _stages(self.region.bbox_roi_extractor), strict=True):
            classes, deltas = head(_features(extractor, maps, rois))
            logits.append(classes)
            number = 1 if head.reg_class_agnostic else head.num_classes
            deltas = deltas.unflatten(1, (number, 4))
            if head is not heads[-1]:
                labels = classes[:, :-1].argmax(1).clamp(max=number - 1)
                labels = labels[:, None, None].expand(-1, 1, 4)
                refined = head.bbox_coder.decode(
                    rois.flatten(0, 1), deltas.gather(1, labels)[:, 0], max_shape=size
                )
                rois = refined.unflatten(0, (batch, count))
        corners = head.bbox_coder.decode(
            rois.flatten(0, 1).repeat_interleave(number, 0), deltas.flatten(0, 1), max_shape=size
        )
        corners = corners.view(batch, count, number, 4).expand(-1, -1, head.num_classes, -1)
        shares = torch.stack(logits).mean(0).softmax(-1)[:, :-1].unflatten(0, (batch, count))
        shares = shares * (shares > self.least) * (certainty > 0)[..., None]
        labels = torch.arange(head.num_classes, device=rois.device).repeat(count)
        return _suppressed(
            corners.flatten(1, 2),
            shares.flatten(1),
            labels.expand(batch, -1),
            self.config.nms.iou_threshold,
            self.most,
        )

    def masks(
        self, maps: Any, boxes: Tensor, labels: Tensor, original: Tensor, size: Tensor
    ) -> Tensor:
        """Predict masks in the boxes and paste them into images of the original size."""
        heads, extractors = map(_stages, (self.region.mask_head, self.region.mask_roi_extractor))
        shares = torch.stack(
            [
                head(_features(extractor, maps, boxes)).sigmoid()
                for head, extractor in zip(heads, extractors, strict=True)
            ]
        ).mean(0)
        places = torch.zeros_like(labels) if heads[-1].class_agnostic else labels
        places = places.flatten()[:, None, None, None].expand(-1, 1, *shares.shape[2:])
        shares = shares.gather(1, places)[:, 0].unflatten(0, boxes.shape[:2])
        x_min, y_min, x_max, y_max = original.unbind(-1)
        height, width = _sides(size)
        rows = _spread(y_min, y_max, height, shares.shape[2])
        columns = _spread(x_min, x_max, width, shares.shape[3])
        return rows @ shares @ columns.mT >= self.config.mask_thr_binary


def _stages(part: Any) -> list[Any]:
    """Return the parts of a cascade, or the only one."""
    return list(part) if isinstance(part, nn.ModuleList) else [part]


def _features(extractor: Any, maps: Any, boxes: Tensor) -> Tensor:
    """Return the features (B N, C, h, w) of boxes (B, N, 4), each from the map of its size."""
    images = torch.arange(boxes.shape[0], device=boxes.device).to(boxes)
    images = images[:, None, None].expand(-1, boxes.shape[1], 1)
    rois = torch.cat([images, boxes], -1).flatten(0, 1)
    levels = extractor.map_roi_levels(rois, len(extractor.roi_layers))
    parts = []
    for level, (layer, features) in enumerate(zip(extractor.roi_layers, maps, strict=False)):
        crops = ops.roi_align(
            features, rois, layer.output_size, layer.spatial_scale, -1, layer.aligned
        )
        parts.append(crops * (levels == level)[:, None, None, None])
    return torch.stack(parts).sum(0)


def _inherits(part: Any, base: type, *names: str) -> bool:
    """Return True if methods of a toolkit's part are those of a base class."""
    return all(getattr(type(part), name) is getattr(base, name) for name in names)


def _sides(size: Tensor) -> tuple[int, int]:
    """Return a height and width that are values of a tensor (2,)."""
    height, width = size.tolist()
    for side in (height, width):
        torch._check(side >= 1)
        torch._check(side <= LONGEST)
    return height, width


def _spread(start: Tensor, end: Tensor, length: int, count: int) -> Tensor:
    """Return the bilinear weights of ``count`` places from start to end (B, N, length, count)."""
    places = torch.arange(length, device=start.device) + 0.5
    spans = (end - start).clamp(min=1e-6)[..., None]
    positions = (places - start[..., None]) / spans * count - 0.5
    return (1 - (positions[..., None] - torch.arange(count, device=start.device)).abs()).relu()


def _candidates(
    head: Any, config: Any, maps: Any, size: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the surest pairs of a place and a class of each level, decoded.

    Returns:
        Boxes (B, K, 4), and scores, labels and levels (B, K); unused places have score 0.

    Raises:
        ValueError: The number per level is open.
    """
    count = config.get("nms_pre", -1)
    if count < 1:
        raise ValueError("its test_cfg lacks nms_pre, the candidates per level")
    classes, *outputs = head(maps)
    priors = head.prior_generator.grid_priors(
        [level.shape[-2:] for level in classes], dtype=classes[0].dtype, device=classes[0].device
    )
    parts = []
    for level, row in enumerate(zip(classes, priors, *outputs, strict=True)):
        boxes, scores, labels = _level_candidates(head, config, size, *row)
        if config.get("min_bbox_size", -1) >= 0:
            sides = boxes[..., 2:] - boxes[..., :2]
            scores = scores * (sides > config.min_bbox_size).all(-1)
        parts.append((boxes, scores, labels, torch.full_like(labels, level)))
    boxes, scores, labels, levels = (torch.cat(part, 1) for part in zip(*parts, strict=True))
    return boxes, scores, labels, levels


def _level_candidates(
    head: Any,
    config: Any,
    size: Any,
    classes: Tensor,
    priors: Tensor,
    deltas: Tensor,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the surest decoded boxes (B, K, 4) of a level with scores and labels (B, K)."""
    count, number = config.nms_pre, head.num_classes
    scores = _places(classes, head.cls_out_channels)
    scores = scores.sigmoid() if head.use_sigmoid_cls else scores.softmax(-1)[..., :-1]
    scores = scores * (scores > config.get("score_thr", 0))
    # Small maps have fewer pairs than are taken.
    surest = F.pad(scores.flatten(1), (0, count)).topk(count, dim=1)
    places = (surest.indices // number).clamp(max=scores.shape[1] - 1)
    deltas = _places(deltas, head.bbox_coder.encode_size)
    deltas = deltas.gather(1, places[..., None].expand(-1, -1, deltas.shape[2]))
    boxes = head.bbox_coder.decode(priors[places.flatten()], deltas.flatten(0, 1), max_shape=size)
    values = surest.values
    if factors is not None:
        values = values * _places(factors, 1).sigmoid()[..., 0].gather(1, places)
    return boxes.unflatten(0, places.shape), values, surest.indices % number


def _suppressed(
    boxes: Tensor, scores: Tensor, groups: Tensor, overlap: float, most: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Keep the surest of overlapping boxes of a group, at most ``most`` per image, surest first.

    Args:
        boxes: (B, K, 4).
        scores: (B, K); 0 for none.
        groups: Numbers of the groups (B, K).
        overlap: Most intersection over union of two kept boxes.
        most: N.

    Returns:
        Boxes (B, N, 4), scores and groups (B, N); the rest has score 0.
    """
    # Boxes of different groups are moved apart, as in mmcv.
    reach = (boxes * (scores > 0)[..., None]).amax((1, 2)) + 1
    moved = boxes + (groups * reach[:, None])[..., None]
    marks = kept_boxes(moved, scores, overlap, 0.0, most)
    best = (scores * marks).topk(min(most, scores.shape[1]), dim=1)
    corners = boxes.gather(1, best.indices[..., None].expand(-1, -1, 4))
    return corners * (best.values > 0)[..., None], best.values, groups.gather(1, best.indices)


def _places(maps: Tensor, channels: int) -> Tensor:
    """Return the values of each place and prior: (B, P C, h, w) -> (B, h w P, C)."""
    return maps.permute(0, 2, 3, 1).flatten(1).unflatten(1, (-1, channels))
