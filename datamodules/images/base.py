"""Base of the datamodules of images with classes: classes, images to predict, memory."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence, Set
from typing import Any, ClassVar

from datamodules.base import BaseDataModule
from datamodules.files.bands import (
    BAND_SUFFIXES,
    Bands,
    Statistics,
    UnlabelledBands,
    collect_bands,
    measure,
    parse_bands,
    parse_statistics,
    read_bands,
)
from datamodules.files.class_order import ClassOrder, other_orders
from datamodules.files.folders import IMAGE_SUFFIXES, first_few
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
        bands: Bands that are read instead of 8-bit RGB, if any.
        statistics: Their statistics; known after ``setup``.
        warned_absent: True once classes missing from validation are checked and logged.
    """

    unit = "images"
    upright: ClassVar[bool] = False
    class_names: tuple[str, ...] = ()
    category_ids: tuple[int, ...] = ()
    class_order: ClassOrder | None = None
    bands: Bands | None = None
    statistics: Statistics | None = None
    warned_absent: bool = False

    def set_bands(self, bands: Any, mean: Any, std: Any) -> None:
        """Set the options ``data.bands``, ``data.band_mean`` and ``data.band_std``."""
        self.bands = parse_bands(bands)
        self.statistics = parse_statistics(self.bands, mean, std)

    @property
    def suffixes(self) -> Set[str]:
        """Endings of the files that count as images."""
        return IMAGE_SUFFIXES if self.bands is None else BAND_SUFFIXES

    def load_bands(self, path: str) -> Any:
        """Return the bands (H, W, C) of a file, in its units."""
        assert self.bands is not None
        return read_bands(path, self.bands)

    def known_statistics(self) -> Statistics:
        """Return the statistics of the bands, known after ``setup``."""
        assert self.statistics is not None, "call setup() first, or pass band_mean and band_std"
        return self.statistics

    def measure_bands(self, paths: Sequence[str]) -> None:
        """Set the statistics of the bands from the training images, unless they are known."""
        if self.bands is not None and self.statistics is None:
            self.statistics = measure(paths, self.bands)
            self.made_by |= self.measured_options()

    def measured_options(self) -> dict[str, Any]:
        """Return the statistics of the bands, as options."""
        if self.bands is None:
            return {}
        statistics = self.known_statistics()
        return {"band_mean": list(statistics.mean), "band_std": list(statistics.std)}

    @property
    def backbone_arguments(self) -> dict[str, Any]:
        """The number of channels."""
        return {"in_chans": 3 if self.bands is None else len(self.bands.numbers)}

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
        """Return the dataset of images to predict, in any form that ``collect_images`` takes.

        Images of bands take the forms of ``collect_bands``.
        """
        if self.bands is not None:
            several = UnlabelledBands(collect_bands(inputs), self.bands, self.predict_sample)
            return TolerantDataset(several, several.name)
        images = UnlabelledImages(collect_images(inputs), self.predict_sample, upright=self.upright)
        return TolerantDataset(images, images.name)

    @abstractmethod
    def predict_sample(self, image: Any, name: str, index: int) -> Any:
        """Return the sample of an image to predict, prepared as in evaluation.

        Args:
            image: 8-bit RGB, or bands (H, W, C).
            name: File of the image, for messages and results.
            index: Position among the images to predict.
        """

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
        names = first_few([self.class_names[label] for label in absent], 10)
        return [f"{len(absent)} of {self.num_classes} classes do not occur in validation: {names}"]
