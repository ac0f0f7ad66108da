"""Batches of MMDetection and MMSegmentation from plain tensors, for loaders of one's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Sample = Mapping[str, Any]


def collate_detection(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """Collate images with boxes into a batch of detectors: ``DataLoader(collate_fn=...)``.

    Args:
        samples: Dictionaries with ``image``, RGB bytes (3, H, W); ``boxes`` (N, 4), left, top,
            right and bottom edges in pixels; ``labels`` (N,), indices of classes. Optional are
            ``masks`` (N, H, W), true inside an object, ``sample_id``, which counts a repeated image
            once, and ``name``. Images may differ in size.

    Returns:
        ``inputs``, BGR bytes, and ``data_samples`` of MMDetection.

    Raises:
        ValueError: Names the entry that is missing or has another shape.
    """
    from mmdet.structures import DetDataSample
    from mmdet.structures.mask import BitmapMasks
    from mmengine.structures import InstanceData

    pairs = []
    for index, sample in enumerate(samples):
        height, width = _check_image(sample, index)
        boxes = _entry(sample, "boxes", index).float().reshape(-1, 4)
        labels = _entry(sample, "labels", index).long()
        if len(boxes) != len(labels) or (boxes[:, 2:] <= boxes[:, :2]).any():
            raise ValueError(
                f"sample {index} of the batch has {len(boxes)} boxes, {len(labels)} labels; each "
                "box needs a label, and an area between left, top, right and bottom in pixels"
            )
        objects: dict[str, Any] = {"bboxes": boxes, "labels": labels}
        if "masks" in sample:
            masks = _entry(sample, "masks", index)
            _check_masks(masks, (len(boxes), height, width), index)
            objects["masks"] = BitmapMasks(masks.byte().numpy(), height, width)
        data_sample = DetDataSample(gt_instances=InstanceData(**objects))
        pairs.append((data_sample, sample))
    return _batch(pairs)


def collate_segmentation(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """Collate images with masks into a batch of segmentors: ``DataLoader(collate_fn=...)``.

    Args:
        samples: Dictionaries with ``image``, RGB bytes (3, H, W), and ``mask``, indices of classes
            (H, W), of which 255 is ignored. Optional are ``sample_id`` and ``name``.

    Returns:
        ``inputs``, BGR bytes, and ``data_samples`` of MMSegmentation.

    Raises:
        ValueError: Names the entry that is missing or has another shape.
    """
    from mmengine.structures import PixelData
    from mmseg.structures import SegDataSample

    pairs = []
    for index, sample in enumerate(samples):
        size = _check_image(sample, index)
        mask = _entry(sample, "mask", index)
        _check_masks(mask, size, index)
        data_sample = SegDataSample(gt_sem_seg=PixelData(data=mask.long()[None]))
        pairs.append((data_sample, sample))
    return _batch(pairs)


def _batch(pairs: Sequence[tuple[Any, Sample]]) -> dict[str, list[Any]]:
    inputs = []
    for place, (data_sample, sample) in enumerate(pairs):
        size = tuple(sample["image"].shape[1:])
        identity = {
            "img_id": int(sample.get("sample_id", -1)),
            "img_path": str(sample.get("name", f"image {sample.get('sample_id', place)}")),
        }
        shapes = {"ori_shape": size, "img_shape": size, "scale_factor": (1.0, 1.0)}
        data_sample.set_metainfo(identity | shapes)
        inputs.append(sample["image"].flip(0))
    return {"inputs": inputs, "data_samples": [data_sample for data_sample, _ in pairs]}


def _check_masks(masks: Tensor, size: tuple[int, ...], index: int) -> None:
    if tuple(masks.shape) != size:
        raise ValueError(
            f"sample {index} of the batch has masks {tuple(masks.shape)}; its image and boxes need "
            f"{size}"
        )


def _check_image(sample: Any, index: int) -> tuple[int, int]:
    """Return the height and width of a sample's image."""
    image = _entry(sample, "image", index)
    if image.dtype != torch.uint8 or image.ndim != 3 or len(image) != 3:
        raise ValueError(
            f"the image of sample {index} of the batch is {image.dtype} {tuple(image.shape)}; "
            "expected RGB bytes (3, H, W), which the toolkit's model normalises"
        )
    height, width = image.shape[1:]
    return height, width


def _entry(sample: Any, name: str, index: int) -> Tensor:
    if not isinstance(sample, Mapping) or name not in sample:
        content = f"the keys {list(sample)}" if isinstance(sample, Mapping) else type(sample)
        raise ValueError(f"sample {index} of the batch lacks {name!r}; it has {content}")
    return torch.as_tensor(sample[name])
