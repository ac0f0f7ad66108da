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
        height, width = size.tolist()
        for side in (height, width):
            torch._check(side >= 1)
            torch._check(side <= 2**16)
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


class Detections(nn.Module):
    """A detector of MMDetection with one stage: its boxes after suppression.

    Per level the surest pairs of a place and a class above the threshold are decoded; of those of a
    class that overlap the surest is kept.

    Args:
        detector: The detector.

    Raises:
        ValueError: Its head decodes by rules of its own.
    """

    def __init__(self, detector: ToolkitModel) -> None:
        from mmdet.models.dense_heads.base_dense_head import BaseDenseHead

        super().__init__()
        self.model = model = detector.model
        head: Any = getattr(model, "bbox_head", None)
        kind, usual = type(head), BaseDenseHead
        names = ("predict", "predict_by_feat", "_predict_by_feat_single", "_bbox_post_process")
        if not isinstance(head, usual) or any(
            getattr(kind, name) is not getattr(usual, name) for name in names
        ):
            raise ValueError(f"{type(model).__name__} predicts by rules of its own")
        config = model.test_cfg
        if config.nms.get("type", "nms") != "nms" or config.nms.get("class_agnostic"):
            raise ValueError(f"its suppression is {config.nms}; a graph has nms per class")
        if config.get("nms_pre", -1) < 1:
            raise ValueError("its test_cfg has no nms_pre, the candidates per level")
        self.head, self.config = head, config
        divisor = getattr(model.data_preprocessor, "pad_size_divisor", 1)
        self.processor = Preprocessed(model.data_preprocessor, divisor)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Detect objects in images (B, H, W, 3).

        Returns:
            Boxes (B, N, 4) of left, top, right and bottom in pixels, scores (B, N), and labels
            (B, N), the surest first; places without an object have score 0 and label -1.
        """
        head, most = self.head, self.config.max_per_img
        classes, *maps = head(self.model.extract_feat(self.processor(images)))
        priors = head.prior_generator.grid_priors(
            [level.shape[-2:] for level in classes], dtype=classes[0].dtype, device=images.device
        )
        levels = zip(classes, priors, *maps, strict=True)
        parts = [self._candidates(images.shape[1:3], *level) for level in levels]
        boxes, scores, labels = (torch.cat(part, 1) for part in zip(*parts, strict=True))
        sides = boxes[..., 2:] - boxes[..., :2]
        if self.config.get("min_bbox_size", -1) >= 0:
            scores = scores * (sides > self.config.min_bbox_size).all(-1)
        # Boxes of different classes are moved apart, as in mmcv.
        reach = (boxes * (scores > 0)[..., None]).amax((1, 2)) + 1
        moved = boxes + (labels * reach[:, None])[..., None]
        marks = kept_boxes(moved, scores, self.config.nms.iou_threshold, 0.0, most)
        best = (scores * marks).topk(most, dim=1)
        exists = best.values > 0
        boxes = boxes.gather(1, best.indices[..., None].expand(-1, -1, 4))
        labels = labels.gather(1, best.indices)
        return (
            boxes * exists[..., None],
            best.values,
            torch.where(exists, labels, torch.full_like(labels, -1)),
        )

    def _candidates(
        self,
        size: Any,
        classes: Tensor,
        priors: Tensor,
        boxes: Tensor,
        factors: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the surest decoded boxes (B, K, 4) of a level with scores and labels (B, K)."""
        head, count = self.head, self.config.nms_pre
        scores = _places(classes, head.cls_out_channels)
        scores = scores.sigmoid() if head.use_sigmoid_cls else scores.softmax(-1)[..., :-1]
        number = head.num_classes
        scores = scores * (scores > self.config.get("score_thr", 0))
        # Small maps have fewer pairs than are chosen.
        pairs = F.pad(scores.flatten(1), (0, count))
        surest = pairs.topk(count, dim=1)
        places = (surest.indices // number).clamp(max=scores.shape[1] - 1)
        deltas = _places(boxes, head.bbox_coder.encode_size)
        deltas = deltas.gather(1, places[..., None].expand(-1, -1, deltas.shape[2]))
        decoded = head.bbox_coder.decode(
            priors[places.flatten()], deltas.flatten(0, 1), max_shape=size
        )
        values = surest.values
        if factors is not None:
            values = values * _places(factors, 1).sigmoid()[..., 0].gather(1, places)
        return decoded.unflatten(0, places.shape), values, surest.indices % number


def _places(maps: Tensor, channels: int) -> Tensor:
    """Return the values of each place and prior: (B, P C, h, w) -> (B, h w P, C)."""
    return maps.permute(0, 2, 3, 1).flatten(1).unflatten(1, (-1, channels))
