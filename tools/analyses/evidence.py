"""Evidence of a network for each class: the scores that class activation maps explain.

For a classifier it is the logit. For a segmentor it is the sum of a class's logit over the pixels
assigned to it (pytorch-grad-cam's SemanticSegmentationTarget). For a detector it is the sum of the
scores of a class's final boxes. The assigned pixels and the final boxes are held fixed.

Axes: B images, K classes, (H, W) the images with padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from backbones.options import unknown
from tasks.engine.family import imported
from tools.analyses.subjects import Batch, Size, Subject


@dataclass(frozen=True)
class Evidence:
    """A network's evidence for each class.

    Attributes:
        scores: (B, K), differentiable.
        amounts: (B, K) probabilities, shares of the pixels, or numbers of boxes.
        predicted: (B,) the class with the most evidence.
    """

    scores: Tensor
    amounts: Tensor
    predicted: Tensor


def evidence_unit(subject: Subject) -> str:
    """Return the kind of ``Evidence.amounts``: "probability", "pixels" or "boxes"."""
    return _finder(subject).amounts


def _finder(subject: Subject) -> Finder:
    finder: Finder = imported(subject.family.analyses["evidence"], __name__)
    return finder


def evidence(subject: Subject, batch: Batch, images: Tensor) -> Evidence:
    """Return a subject's evidence in images.

    Args:
        subject: With a classifier, a segmentor or a detector.
        batch: The batch of the images.
        images: (B, 3, H, W), normalised and padded.

    Raises:
        ValueError: The network lacks a classifier, or has one logit for two classes.
    """
    finder = _finder(subject)
    if finder.find is None:
        logits = subject.logits(images)
        return Evidence(logits, logits.softmax(-1), logits.argmax(1))
    task: Any = subject.task
    count = len(task.class_names)
    scores, amounts = finder.find(task.model.model, images, batch.inside, count)
    return Evidence(scores, amounts, (amounts if finder.by_amount else scores).argmax(1))


def asked_classes(subject: Subject, batch: Batch, request: str) -> Tensor | None:
    """Return the class of each image that class= requests, or None for the predicted ones.

    Args:
        subject: Provides the classes.
        batch: A batch of images.
        request: "predicted", "label", the name of a class or its number.

    Raises:
        ValueError: The class is unknown, or the images lack labels.
    """
    if request == "predicted":
        return None
    if request == "label":
        if evidence_unit(subject) != "probability":
            raise ValueError(
                f"class=label is for classifiers; images of {subject.label} have several classes: "
                f"pass one of its {len(subject.class_names)} as class=<name>"
            )
        if int(batch.labels.min()) < 0:
            raise ValueError("class=label needs labelled images, but these lack labels")
        return batch.labels
    if request in subject.class_names:  # names may be digits
        label = subject.class_names.index(request)
    elif request.isdecimal():
        label = int(request)
    else:
        raise ValueError(unknown("class", request, list(subject.class_names)))
    return torch.full((len(batch.images),), label)


def _segmentor_evidence(
    model: Any, images: Tensor, inside: Sequence[Size], classes: int
) -> tuple[Tensor, Tensor]:
    """Return scores and pixel shares of whole images, also for sliding-window prediction."""
    logits = model.encode_decode(images, [_meta(images, size) for size in inside])
    if logits.shape[1] != classes:
        raise ValueError(
            f"this segmentor has {logits.shape[1]} logits per pixel for {classes} classes; class "
            "maps need one per class"
        )
    scores, shares = [], []
    for maps, (height, width) in zip(logits, inside, strict=True):
        greatest, winners = maps[:, :height, :width].flatten(1).max(0)
        scores.append(greatest.new_zeros(classes).index_add(0, winners, greatest))
        shares.append(winners.bincount(minlength=classes) / len(winners))
    return torch.stack(scores), torch.stack(shares)


def _detector_evidence(
    model: Any, images: Tensor, inside: Sequence[Size], classes: int
) -> tuple[Tensor, Tensor]:
    from mmdet.structures import DetDataSample

    samples = [DetDataSample(metainfo=_meta(images, size)) for size in inside]
    scores, counts = [], []
    with _attached(getattr(model, "bbox_head", None)):
        predictions = model.predict(images, samples, rescale=False)
    for sample in predictions:
        values, labels = sample.pred_instances.scores, sample.pred_instances.labels
        scores.append(values.new_zeros(classes).index_add(0, labels, values))
        counts.append(labels.bincount(minlength=classes))
    return torch.stack(scores), torch.stack(counts)


class _NoDetach(TorchFunctionMode):
    """Make ``tensor.detach()`` return the tensor itself."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.detach else func(*args, **(kwargs or {}))


@contextmanager
def _attached(head: Any) -> Iterator[None]:
    """Keep the gradient of a one-stage detector's box scores, as a context manager.

    MMDetection detaches them when it reads boxes from the head's maps. Earlier detached values,
    such as a DETR's reference points, stay so; heads of two stages detach no scores.
    """
    if head is None:
        yield
        return
    original = head.predict_by_feat

    def predict_by_feat(*args: Any, **kwargs: Any) -> Any:
        with _NoDetach():
            return original(*args, **kwargs)

    head.predict_by_feat = predict_by_feat
    try:
        yield
    finally:
        del head.predict_by_feat


def _meta(images: Tensor, inside: Size) -> dict[str, Any]:
    """Return an image's metadata for the toolkits: it fills ``inside``, the rest is padding."""
    padded = tuple(images.shape[2:])
    return {
        "ori_shape": inside, "img_shape": inside, "pad_shape": padded,
        "batch_input_shape": padded, "scale_factor": (1.0, 1.0),
    }  # fmt: skip


@dataclass(frozen=True)
class Finder:
    """Functions that find the evidence of a family's networks.

    Attributes:
        amounts: Kind of ``Evidence.amounts``: "probability", "pixels" or "boxes".
        find: Function (model, images, inside, classes) -> (scores, amounts); None for logits.
        by_amount: True to predict the class of the largest amount, as for pixels; False for the
            largest score, as for boxes, since many boxes are doubtful.
    """

    amounts: str
    find: Callable[..., tuple[Tensor, Tensor]] | None = None
    by_amount: bool = False


LOGITS = Finder("probability")
PIXELS = Finder("pixels", _segmentor_evidence, by_amount=True)
BOXES = Finder("boxes", _detector_evidence)
