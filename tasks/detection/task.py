"""Object detection and instance segmentation on COCO-format data."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torchvision.ops import nms

from tasks.detection.coco_metric import (
    KINDS,
    STATS,
    BatchCocoMetric,
    CocoMetric,
    instances,
)
from tasks.detection.family import FAMILY
from tasks.detection.instance_drawing import draw_instances
from tasks.engine.answers import SampleAnswers
from tasks.engine.batches import Batch, Row
from tasks.engine.classes import ClassesTask
from tasks.engine.drawing import Colour, open_upright, side_by_side
from tasks.engine.run_folder.atomic_writes import whole_file

SAME_PLACE = 0.7  # of two boxes with a larger overlap (IoU) only the surer one is drawn


class DetectionTask(ClassesTask):
    """Detection by a model of MMDetection; COCO's average precision of boxes and predicted masks.

    Our datamodules provide the ground truth: ``annotations`` and ``category_ids``. Without them it
    is read from the batches, as ``collate_detection`` of ``heads.toolkits.samples`` makes them.

    Args:
        model: Maps batches to losses and detections.
        class_names: Names of the classes, in label order.
        optimizer: See ``BaseTask``.
        schedule: See ``BaseTask``.
        ema: See ``BaseTask``.
        threshold: Score above which detections are drawn and counted in lines; files have all.
    """

    family = FAMILY
    headline = ("AP", "AP50", "mask_AP")
    metric_stores = ("metric",)
    why_no_loss = (
        "a detector's losses are over anchors and proposals that training samples at random"
    )
    metric: CocoMetric

    def __init__(
        self,
        model: nn.Module,
        class_names: Sequence[str],
        *,
        optimizer: Mapping[str, Any] | None = None,
        schedule: Mapping[str, Any] | None = None,
        ema: Mapping[str, Any] | None = None,
        threshold: float = 0.3,
    ) -> None:
        super().__init__(model, class_names, optimizer=optimizer, schedule=schedule, ema=ema)
        if not 0 <= threshold < 1:
            raise ValueError(f"task.threshold must be at least 0 and below 1, got {threshold}")
        self.threshold = threshold

    def prepare_training(self, datamodule: Any) -> None:
        """Read the ground truth before the run starts; one without boxes is refused."""
        super().prepare_training(datamodule)
        datamodule.annotations  # noqa: B018

    def setup(self, stage: str) -> None:
        """Read the ground truth of the datamodule, except for prediction.

        Raises:
            ValueError: The detector cannot merge the several views of a test, or it predicts masks
                that the data lack.
        """
        super().setup(stage)
        trainer: Any = self.trainer
        data = trainer.datamodule
        if getattr(data, "has_views", False):
            self.model.check_merges()
        if stage == "predict":
            return
        with_masks = bool(getattr(self.model.model, "with_mask", False))
        if not hasattr(type(data), "annotations"):
            self.metric = BatchCocoMetric(self.class_names, with_masks=with_masks)
            return
        if with_masks and not getattr(data, "with_mask", True):
            raise ValueError(
                "this head predicts masks, but data.with_mask=false; pass a head of boxes alone, "
                "such as head=retinanet, or data.with_mask=true"
            )
        self.metric = CocoMetric(data.annotations, data.category_ids, with_masks=with_masks)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Return the names of COCO's precisions of boxes, and of masks if predicted."""
        with_masks = bool(getattr(self.model.model, "with_mask", False))
        return tuple(f"{prefix}AP{end}" for _, prefix in KINDS[: 1 + with_masks] for end in STATS)

    def update_metrics(self, batch: Batch, predictions: list[Any]) -> None:
        """Add the detections."""
        self.metric.update(predictions)

    def compute_metrics(self) -> dict[str, torch.Tensor]:
        """Return COCO's figures, in [0, 1]."""
        figures = self.metric.compute()
        class_figures = self.metric.class_figures
        self.class_figures = [
            {"class": name, **class_figures[category]}
            for name, category in zip(self.class_names, self.metric.category_ids, strict=True)
        ]
        return {name: value.to(self.device) for name, value in figures.items()}

    def sample_values(self, batch: Batch, predictions: list[Any]) -> None:
        """Return None: the metric has the detections of all images."""

    def gather_answers(self, dataset: Any) -> SampleAnswers:
        """Return the detections of each image with the objects that they match."""
        return self.metric.match()

    def reset_metrics(self) -> None:
        """Reset the detections."""
        self.metric.reset()

    def describe(self, batch: Batch, datamodule: Any) -> list[Row]:
        """Return per image ``input``, its name, ``image_id`` and ``detections``, the surest first.

        A detection has ``bbox`` (x, y, width, height) in pixels of the image, ``score``, ``class``
        and, if the detector predicts masks, ``segmentation`` in COCO's run-length code.
        """
        labels = range(len(self.class_names))
        results = []
        for sample in self.model.predict(batch):
            rows = instances(sample, labels)
            for row in rows:
                row["class"] = self.class_names[row.pop("category_id")]
                row.pop("image_id")
            number = int(sample.img_id)
            results.append({"input": sample.img_path, "image_id": number, "detections": rows})
        return results

    def answer(self, row: Row) -> str:
        """Return the number of objects per class with a score above the threshold."""
        counts = Counter(r["class"] for r in row["detections"] if r["score"] > self.threshold)
        text = ", ".join(f"{count} {name}" for name, count in counts.most_common())
        objects = "object" if counts.total() == 1 else "objects"
        return f"{counts.total()} {objects} above {self.threshold}{': ' * bool(text)}{text}"

    def write_results(self, folder: Path, rows: Sequence[Row]) -> None:
        """Write coco_results.json, a list of detections with the data set's category ids."""
        ids = dict(zip(self.class_names, self.category_ids, strict=True))
        results = (
            {"image_id": row["image_id"], "category_id": ids[detection["class"]]}
            | {key: value for key, value in detection.items() if key != "class"}
            for row in rows
            for detection in row["detections"]
        )
        with whole_file(folder / "coco_results.json") as file:
            file.write(b"[")
            for index, result in enumerate(results):
                file.write(f"{',' if index else ''}\n{json.dumps(result)}".encode())
            file.write(b"\n]\n")

    @torch.no_grad()
    def preview(self, batch: Batch, datamodule: Any) -> list[Image.Image]:
        """Draw per image the ground truth, if any, and the detections above the threshold.

        Of overlapping detections of any class only the surest is drawn.
        """
        colours = datamodule.metainfo["palette"]
        truths = [sample.get("gt_instances") for sample in batch["data_samples"]]
        pictures = []
        for sample, truth in zip(self.model.predict(batch), truths, strict=True):
            photo = open_upright(sample.img_path)
            preds = _to_draw(sample.pred_instances, self.threshold).cpu()
            captions = [
                f"{self.class_names[label]} {score:.2f}"
                for label, score in zip(preds.labels.tolist(), preds.scores.tolist(), strict=True)
            ]
            masks = preds.masks.numpy() if "masks" in preds else None
            picture = draw_instances(
                photo, preds.bboxes.tolist(), preds.labels.tolist(), captions, colours, masks
            )
            if truth is not None and len(truth):
                annotated = self._draw_truth(photo, truth, colours)
                picture = side_by_side(annotated, picture, ("annotated", "predicted"))
            pictures.append(picture)
        return pictures

    def _draw_truth(self, photo: Image.Image, truth: Any, colours: Sequence[Colour]) -> Image.Image:
        boxes = getattr(truth.bboxes, "tensor", truth.bboxes)
        labels = truth.labels.tolist()
        masks = truth.masks.to_ndarray().astype(bool) if "masks" in truth else None
        names = [self.class_names[label] for label in labels]
        boxes = np.asarray(boxes.cpu()).tolist()
        return draw_instances(photo, boxes, labels, names, colours, masks)


def _to_draw(instances: Any, threshold: float) -> Any:
    """Select the detections to draw: sure ones, without those that overlap a surer one."""
    instances = instances[instances.scores > threshold]
    return instances[nms(instances.bboxes.float(), instances.scores.float(), SAME_PLACE)]
