"""What all tasks make of images without labels: rows, answers and pictures."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from PIL import Image

from tasks.engine.batches import Batch, Row, batch_size
from tasks.engine.ema import WeightEMA

UNREADABLE = "unreadable"  # key of the reason in a row of an image that cannot be read


class Prediction(LightningModule):
    """The part of a ``BaseTask`` that predicts; the attributes are the task's own."""

    data: Any
    model: Any
    ema: WeightEMA | None
    class_names: tuple[str, ...]
    category_ids: tuple[int, ...]

    @property
    def is_spare(self) -> bool:
        """True in a process beyond the number of images; see ``Evaluation``."""
        raise NotImplementedError

    @torch.no_grad()
    def predict(self, images: Any) -> list[Row]:
        """Predict images, prepared as in evaluation: of a task from ``tasks.load``.

        An image gets the prediction that it gets alone. Several threads may call at the same time.

        Args:
            images: One image or a list of them: paths (of a folder, all its images), PIL images,
                arrays (H, W, 3), tensors (3, H, W), grey ones (H, W), or batches of these; uint8,
                or floats from 0 to 1.

        Returns:
            A dict for each image, as in predictions.json; see the tasks' ``describe``.
        """
        if self.data is None:
            self.data = self._usual_data()
        self.eval()
        data = self.data.with_predict_images(images)
        data.num_workers = 0  # what a few images gain from others is less than these take to start
        rows: list[Row] = []
        with self._evaluated_weights():
            for batch in data.predict_dataloader():
                for broken in batch.pop("unreadable", ()):
                    raise ValueError(broken.reason)
                placed = self.transfer_batch_to_device(batch, self.device, 0)
                rows += self.describe(placed, data)
        return rows

    def _evaluated_weights(self) -> contextlib.AbstractContextManager[Any]:
        """The average, if it is what evaluation sees and the model does not have it already."""
        ema = self.ema
        if ema is None or not ema.tensors or not ema.is_reported:
            return contextlib.nullcontext()
        return ema.worn_by(self.model)

    def _usual_data(self) -> Any:
        """A datamodule for a task that was trained without one."""
        from tasks.engine.instantiate import build
        from tasks.engine.loading import usual_data

        size = getattr(getattr(self.model, "backbone", None), "img_size", None)
        names = [f"{one.__module__}.{one.__qualname__}" for one in type(self).__mro__]
        data = build({"data": usual_data(names, size)}, "data", seed=0)
        data.predict_only(self.class_names, self.category_ids)
        return data

    def setup(self, stage: str) -> None:
        """Keep the trainer's datamodule, if it is one of ours, to predict with."""
        data = getattr(self.trainer, "datamodule", None)
        if hasattr(data, "with_predict_images"):
            self.data = data

    def predict_step(self, batch: Batch, batch_idx: int) -> list[Row]:
        """Predictions of a batch of the trainer's datamodule; arrays go to files of the run."""
        trainer: Any = self.trainer
        if self.is_spare:
            return []
        broken = batch.pop("unreadable", ())
        described = self.describe(batch, trainer.datamodule) if batch else []
        rows = [self.filed(row) for row in described]
        return rows + [{"image": one.name, UNREADABLE: one.reason} for one in broken]

    def image_names(self, batch: Batch, datamodule: Any) -> list[str]:
        """The files of a batch's images; numbers of those that no datamodule of ours knows."""
        samples = batch.get("sample_id")
        if samples is None or not hasattr(datamodule, "predict_name"):
            return [f"image {index}" for index in range(batch_size(batch))]
        return [datamodule.predict_name(sample) for sample in samples.tolist()]

    def describe(self, batch: Batch, datamodule: Any) -> list[Row]:
        """Predictions as plain values, one dict per image."""
        raise NotImplementedError

    def filed(self, row: Row) -> Row:
        """A row of ``describe`` as json takes it."""
        return row

    def answer(self, row: Row) -> str:
        """A row of ``describe`` in words, for the terminal."""
        raise NotImplementedError

    def write_results(self, folder: Path, rows: Sequence[Row]) -> None:
        """Write predictions as other tools read them, beside predictions.json."""

    def preview(self, batch: Batch, datamodule: Any) -> list[Image.Image]:
        """Draw the predictions for a batch of the datamodule, which says what drawing has to know.

        That is ``normalisation``, the mean and deviation of its images, or ``background``, the
        class that is not tinted.
        """
        raise NotImplementedError
