"""What data modules of images with classes share: classes, pictures to predict, memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from PIL import Image

from datamodules.base import BaseDataModule
from datamodules.files import first_few
from datamodules.files.class_order import ClassOrder, other_orders
from datamodules.files.pictures import Pictures, as_images
from datamodules.loading.memory import FLOAT, refuse_larger
from datamodules.loading.sampling import NamedDataset, TolerantDataset


class ImageDataModule(BaseDataModule):
    """Images with classes; a subclass sets ``class_names`` in ``build``.

    Attributes:
        class_names: Names of the classes, in label order; known after ``setup``.
        category_ids: What the files of the set call each label, where that is not the label.
        class_order: In which names of folders become labels; None if the files number the classes.
        upright: True if images are turned as their EXIF orientation says.
        told_absent: True once the classes that validation lacks are known and logged.
    """

    unit = "images"
    upright: ClassVar[bool] = False
    class_names: tuple[str, ...] = ()
    category_ids: tuple[int, ...] = ()
    class_order: ClassOrder | None = None
    told_absent: bool = False

    @property
    def num_classes(self) -> int:
        """Number of classes; known after ``setup``."""
        if not self.class_names:
            raise ValueError(
                f"{type(self).__name__} knows its classes only after setup(); call it first"
            )
        return len(self.class_names)

    @property
    def other_orders(self) -> dict[str, tuple[str, ...]]:
        """The classes by each other ``data.class_order`` that would number them differently."""
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
        """Return the classes in their order."""
        return {"classes": list(self.class_names)}

    def predict_only(self, class_names: Sequence[str], category_ids: Sequence[int] = ()) -> None:
        """Know the classes from elsewhere and serve prediction, so that no data set is needed."""
        self.class_names, self.category_ids = tuple(class_names), tuple(category_ids)
        super().predict_only()

    def unlabelled_dataset(self, inputs: Any) -> NamedDataset:
        """Return the data set of images to predict; see ``as_images`` for what they may be."""
        pictures = Pictures(as_images(inputs), self.unlabelled, upright=self.upright)
        return TolerantDataset(pictures, pictures.name)

    def unlabelled(self, image: Image.Image, name: str, index: int) -> Any:
        """The sample of an image to predict, prepared as in evaluation.

        Args:
            image: 8-bit RGB.
            name: Its file, for messages and results.
            index: Its place among those to predict.
        """
        raise NotImplementedError

    def check_memory(self, size: tuple[int, int], options: str) -> None:
        """Refuse batches that are larger than the machine's memory.

        Args:
            size: Height and width of the largest image of a batch.
            options: What decides it, for the message.

        Raises:
            ValueError: Names the size of a batch.
        """
        height, width = size
        for name in ("batch_size", "eval_batch_size"):
            count = getattr(self, name)
            refuse_larger(
                f"a batch of {count:,} images of {height:,}x{width:,} pixels (data.{name})",
                count * 3 * height * width * FLOAT,
                f"lower data.{name} or {options}",
            )

    def absent_notice(self, absent: Sequence[int]) -> list[str]:
        """The notice of classes, by label, that no validation image has; none where all occur."""
        self.told_absent = True
        if not absent:
            return []
        named = first_few([self.class_names[label] for label in absent], 10)
        return [f"{len(absent)} of {self.num_classes} classes do not occur in validation: {named}"]
