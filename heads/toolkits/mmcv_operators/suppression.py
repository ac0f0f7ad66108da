"""Non-maximum suppression: keeps the best of overlapping boxes among N."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchvision import ops

from heads.toolkits.mmcv_operators.precision import upcast

Array = NDArray[Any]


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float, offset: int) -> Tensor:
    """Return the indices of the kept boxes (N, 4), best first; ``offset`` is 1 in pixel units."""
    # mmcv orders equal scores differently than torchvision, so torchvision gets ranks.
    order = scores.sort(0, descending=True)[1]
    corners = upcast(boxes)[order]
    if offset:  # moving the far corners by one pixel adds one to every width, overlaps included
        corners = corners + corners.new_tensor([0, 0, offset, offset])
    ranks = torch.arange(len(order), 0, -1, device=corners.device).to(corners)
    # mmcv compares in float32, where 0.6 is slightly more than in double precision.
    return order[ops.nms(corners, ranks, float(np.float32(iou_threshold)))]


def nms_match(dets: Tensor, iou_threshold: float) -> list[list[int]]:
    """Return per kept box its index and those it suppresses; ``dets`` is (N, 5)."""
    boxes, rest = dets[:, :4].numpy(), dets[:, 4].sort(0, descending=True)[1].numpy()
    groups = []
    while len(rest):
        near = _overlaps(boxes[rest[0]], boxes[rest], 0) >= np.float32(iou_threshold)
        near[0] = True  # also for a box of area 0
        groups.append(rest[near].tolist())
        rest = rest[~near]
    return groups


def softnms(
    boxes: Tensor,
    scores: Tensor,
    dets: Tensor,
    iou_threshold: float,
    sigma: float,
    min_score: float,
    method: int,
    offset: int,
) -> Tensor:
    """Fill ``dets`` (N, 5) by Soft-NMS on the CPU and return the indices, best first.

    Args:
        boxes: (N, 4).
        scores: (N,).
        dets: Output: boxes with lowered scores, one row per returned index.
        iou_threshold: Overlap from which methods 0 and 1 lower scores.
        sigma: Width of method 2.
        min_score: Boxes with a lower score are dropped.
        method: 0 drops, 1 lowers linearly, 2 by a Gaussian of the overlap.
        offset: 1 in pixel units, else 0.
    """
    places, values = boxes.numpy(), scores.numpy().copy()
    rest: Array = np.arange(len(places))
    best: list[int] = []
    kind = values.dtype.type
    while len(rest):
        first = int(values[rest].argmax())
        rest[[0, first]] = rest[[first, 0]]
        place_of_best, rest = rest[0], rest[1:]
        dets[len(best), :4], dets[len(best), 4] = boxes[place_of_best], float(values[place_of_best])
        best.append(int(place_of_best))
        shared = _overlaps(places[place_of_best], places[rest], offset)
        if method == 2:
            values[rest] *= np.exp(-(shared * shared) / kind(sigma))
        else:
            lowered = 1 - shared if method == 1 else np.zeros_like(shared)
            values[rest] *= np.where(shared >= kind(np.float32(iou_threshold)), lowered, kind(1))
        rest = _drop(rest, values[rest] < kind(min_score))
    return torch.tensor(best, dtype=torch.long)


def _drop(items: Array, dropped: Array) -> Array:
    """Fill each gap with the last kept item, an order that decides between equal scores."""
    end = int((~dropped).sum())
    gaps, movers = np.flatnonzero(dropped[:end]), end + np.flatnonzero(~dropped[end:])
    items[gaps] = items[movers[::-1]]
    return items[:end]


def _overlaps(box: Array, boxes: Array, offset: int) -> Array:
    """Return the intersection over union of a box (4,) with others (N, 4), in their precision."""
    near, far = np.maximum(box[:2], boxes[:, :2]), np.minimum(box[2:], boxes[:, 2:])
    shared = np.maximum(far - near + offset, 0).prod(1)
    areas = (boxes[:, 2:] - boxes[:, :2] + offset).prod(1)
    with np.errstate(invalid="ignore", divide="ignore"):  # boxes of area 0
        return shared / ((box[2:] - box[:2] + offset).prod() + areas - shared)
