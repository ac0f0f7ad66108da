"""Base of the datamodules of images with classes: classes, images to predict, memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from PIL import Image

from datamodules.base import BaseDataModule
from datamodules.files.class_order import ClassOrder, other_orders
from datamodules.files.folders import first_few
from datamodules.files.unlabelled import UnlabelledImages, collect_images
from datamodules.loading.memory import check_images_fit
from datamodules.loading.sampling import NamedDataset, TolerantDataset


class ImageDataModule(BaseDataModule):
    """Images with classes; a subclass sets ``class_names`` in ``build``.

    Attributes:
        class_names: Names of the classes, in label order; known after ``setup``.
        category_ids: The dataset's own id per label, where ids and labels differ.
        class_order: Order in which folder names become labels; None if files number the classes.
        upright: True if images are rotated by their EXIF orientation.
        warned_absent: True once classes missing from validation are checked and logged.
    """

    unit = "images"
    upright: ClassVar[bool] = False
    class_names: tuple[str, ...] = ()
    category_ids: tuple[int, ...] = ()
    class_order: ClassOrder | None = None
    warned_absent: bool = False

    @property
    def num_classes(self) -> int:
        """Number of classes; known after ``setup``."""
        if not self.class_names:
            raise ValueError(
                f"the classes of {type(self).__name__} are known after setup(); call it first"
            )
        return len(self.class_names)

    @property
    def other_orders(self) -> dict[str, tuple[str, ...]]:
        """The classes in each other ``data.class_order`` that would number them differently."""
        return other_orders(self.class_names, self.class_order)

    @property
    def head_arguments(self) -> dict[str, Any]:
        """The number of classes."""
        return {"num_classes": self.num_classes}

    @property
    def task_arguments(self) -> dict[str, Any]:
        """The names of the classes."""
        return {"class_names": self.class_names}

    def target_facts(self) -> dict[str, Any]:
        """Return the number of classes."""
        return {"classes": len(self.class_names)}

    def target_identity(self) -> dict[str, Any]:
        """Return the classes in label order."""
        return {"classes": list(self.class_names)}

    def predict_only(self, class_names: Sequence[str], category_ids: Sequence[int] = ()) -> None:
        """Set the classes and serve prediction alone, without reading a dataset."""
        self.class_names, self.category_ids = tuple(class_names), tuple(category_ids)
        super().predict_only()

    def unlabelled_dataset(self, inputs: Any) -> NamedDataset:
        """Return the dataset of images to predict, in any form that ``collect_images`` takes."""
        found = UnlabelledImages(collect_images(inputs), self.predict_sample, upright=self.upright)
        return TolerantDataset(found, found.name)

    def predict_sample(self, image: Image.Image, name: str, index: int) -> Any:
        """Return the sample of an image to predict, prepared as in evaluation.

        Args:
            image: 8-bit RGB.
            name: File of the image, for messages and results.
            index: Position among the images to predict.
        """
        raise NotImplementedError

    def check_memory(self, size: tuple[int, int], options: str) -> None:
        """Check that a batch fits into the machine's memory.

        Args:
            size: Height and width of the largest image of a batch.
            options: Options that decide the size, for the message.

        Raises:
            ValueError: A batch is larger than the memory; the message names its size.
        """
        for name in ("batch_size", "eval_batch_size"):
            remedy = f"lower data.{name} or {options}"
            check_images_fit(getattr(self, name), size, remedy, f"data.{name}")

    def absent_notice(self, absent: Sequence[int]) -> list[str]:
        """Return the notice of classes, by label, that occur in training only; [] if all occur."""
        self.warned_absent = True
        if not absent:
            return []
        named = first_few([self.class_names[label] for label in absent], 10)
        return [f"{len(absent)} of {self.num_classes} classes do not occur in validation: {named}"]
