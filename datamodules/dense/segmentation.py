"""Base of the semantic segmentation datasets: images with masks."""

from __future__ import annotations

import importlib
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from datamodules.base import SPLITS, Split, check_range, check_share
from datamodules.dense.masks import (
    Code,
    MaskCode,
    StrictMask,
    check_mask_shape,
    check_meaning,
    read_class_names,
)
from datamodules.dense.toolkit_data import (
    DenseDataModule,
    Packed,
    Size,
    Step,
    StrictImage,
    check_not_thin,
    parse_size,
)
from datamodules.files.bands import read_shape
from datamodules.files.decoding import UPRIGHT
from datamodules.files.folders import first_few
from datamodules.files.headers import Header, read_header
from datamodules.files.mask_colours import IGNORED, Colour, ColourCode
from datamodules.files.values import check_option, integer_list
from datamodules.loading.sampling import SeededDataset

MEASURED = 200  # training images whose sizes decide ``scale``


class Pair(NamedTuple):
    """An image and its mask."""

    image: Path
    mask: Path


Pairs = Mapping[Split, Sequence[Pair]]


class SegmentationDataModule(DenseDataModule):
    """Base of datasets of images with masks; subclasses define ``pairs`` and ``code``.

    Args:
        root: Folder of the dataset.
        scale: Longest and shortest edge after resizing; the aspect ratio is kept.
        crop_size: Height and width of a training crop.
        scale_jitter: Smallest and largest factor of ``scale`` in training.
        cat_max_ratio: A training crop is drawn again while one class exceeds this share.
        flip: Probability of a horizontal flip; digits and letters need 0.
        photometric: Distort brightness, contrast and colour in training.
        colors: RGB values per class if colours are the labels; None if values are.
        ignored_colors: RGB values of ignored pixels in such masks; None for none.
        batch_size: Samples per training batch and process.
        **options: Options of ``DenseDataModule``.

    Attributes:
        code: Meaning of the masks' values or colours; known after ``setup``.
        two_values: Advice for masks of two classes with only the values 0 and 255.
        mmseg_dataset: mmseg's dataset with the layout's own classes, if any.
        reduces_zero_label: True if mmseg must treat label 0 as ignored.
    """

    package = "mmseg.datasets"
    code: Code
    mmseg_dataset: ClassVar[str] = ""
    reduces_zero_label = False
    two_values = "pass the folders with data=segmentation_folder and data.values=[0,255]"

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        scale: int | Sequence[int] = (2048, 512),
        crop_size: int | Sequence[int] = 512,
        scale_jitter: Sequence[float] = (0.5, 2.0),
        cat_max_ratio: float = 0.75,
        flip: float = 0.5,
        photometric: bool = True,
        colors: Sequence[Sequence[int]] | None = None,
        ignored_colors: Sequence[Sequence[int]] | None = None,
        batch_size: int = 4,
        **options: Any,
    ) -> None:
        super().__init__(root, batch_size=batch_size, **options)
        self.scale = parse_size("scale", scale)
        self.crop_size = parse_size("crop_size", crop_size)
        self.scale_jitter = check_range("scale_jitter", scale_jitter)
        self.cat_max_ratio, self.photometric = cat_max_ratio, photometric
        self.flip = check_share("flip", flip)
        self.check_scales(self.scale, self.crop_size)
        self.colors = None if colors is None else parse_colours("colors", colors)
        self.ignored_colors = parse_colours("ignored_colors", ignored_colors or ())
        every = [*(self.colors or ()), *self.ignored_colors]
        rule = "beside data.colors, and all must be different colours"
        valid = (self.colors is not None or not every) and len({*every}) == len(every)
        check_option("ignored_colors", [*self.ignored_colors], valid, rule)
        self._seen: dict[Split, set[int]] = {}  # classes in the masks checked
        self._rotated: list[str] = []  # images with another EXIF orientation than their masks
        self._grey: list[str] = []  # masks with three equal channels

    @property
    def head_arguments(self) -> dict[str, Any]:
        """The number of classes, and the statistics of bands."""
        if self.bands is None:
            return super().head_arguments
        info = self.known_statistics()
        return super().head_arguments | {"mean": info.mean, "std": info.std}

    @property
    def metainfo(self) -> dict[str, Any]:
        """Classes and colours: of the masks, of the dataset, or generated."""
        info = super().metainfo
        if self.colors is not None and len(self.colors) == self.num_classes:
            return info | {"palette": [list(colour) for colour in self.colors]}
        layout_info = self.known_metainfo()
        return (
            layout_info if list(self.class_names) == list(layout_info.get("classes", ())) else info
        )

    def known_metainfo(self) -> dict[str, Any]:
        """Return names and colours of the layout's own classes, or {}."""
        if not self.mmseg_dataset:
            return {}
        datasets = importlib.import_module("mmseg.datasets")
        return dict(getattr(datasets, self.mmseg_dataset).METAINFO)

    def read_names(self, folder: Path) -> tuple[str, ...]:
        """Return the names in ``class_names.txt``, or the layout's own if the file is missing."""
        file = folder / "class_names.txt"
        return read_class_names(file) if file.is_file() else tuple(self.known_metainfo()["classes"])

    @abstractmethod
    def pairs(self) -> Pairs:
        """Check the folders; set ``class_names``, ``category_ids`` and ``code``."""

    def build(self) -> dict[Any, SeededDataset]:
        """Check the folders and wrap mmseg's datasets."""
        pairs = self.pairs()
        self.measure_bands([str(pair.image) for pair in pairs["train"]])
        masks = [pair.mask for split in SPLITS for pair in pairs[split]]
        assert isinstance(self.code, MaskCode)
        if self.colors is None:
            check_meaning(masks, self.code, self.two_values)
        else:
            self.code = self._colour_code(self.colors, self.code)
        return {
            "train": self.wrap(self._dataset(pairs["train"], self.train_steps(), False)),
            "val": self.wrap(self._dataset(pairs["val"], self.test_steps(), True)),
        }

    def _colour_code(self, colors: tuple[Colour, ...], code: MaskCode) -> ColourCode:
        rule = f"one colour for each of {self.num_classes} classes ({first_few(self.class_names)})"
        check_option("colors", colors, len(colors) == self.num_classes, rule)
        return ColourCode(colors, self.ignored_colors, code.values)

    def file_check(self, split: Split) -> Callable[[int], None]:
        """Return a check of headers, ends and, in validation, the labels of masks.

        Training masks are decoded only until one has a class.
        """
        dataset: Any = self.dataset(split).dataset
        strict = StrictMask(self.code)
        classes = self._seen[split] = set()

        def check(index: int) -> None:
            info = dataset.get_data_info(index)
            image, mask = info["img_path"], info["seg_map_path"]
            width, height, orientation = self._header(image)
            header = read_header(mask, upright=True)
            if UPRIGHT != orientation != header.orientation:
                self._rotated.append(image)
            check_mask_shape(mask, (header.height, header.width), (height, width), image)
            scale = self.smallest_train_scale if split == "train" else self.scale
            check_not_thin(image, (width, height), scale)
            if split == "val" or not classes:
                pixels = strict.pixels(mask)
                if pixels.ndim == 3 and isinstance(self.code, MaskCode):
                    self._grey.append(mask)
                classes.update(set(np.unique(self.code.labels(pixels, mask)).tolist()) - {IGNORED})

        return check

    def image_sizes(self) -> list[Size]:
        """Return widths and heights of training images, evenly spaced, from their headers."""
        dataset = self.dataset("train")
        step = -(-len(dataset) // MEASURED)
        headers = (self._header(dataset.describe(i)) for i in range(0, len(dataset), step))
        return [(header.width, header.height) for header in headers]

    def _header(self, image: str) -> Header:
        if self.bands is None:
            return read_header(image, upright=True)
        height, width = read_shape(image, self.bands)
        return Header(width, height, UPRIGHT)

    def notices(self, checked: Mapping[Split, int]) -> list[str]:
        """Return notices of masks without classes, absent classes, and doubtful readings."""
        lines = super().notices(checked)
        ignored = self.code.ignored
        labels = " and ".join(map(str, ignored)) if 0 < len(ignored) < 3 else "labels"
        for split, name in SPLITS.items():
            if checked[split] and not self._seen[split]:
                lines.append(
                    f"All {checked[split]:,} {name} masks that were checked have only "
                    f"{labels}, which {'are' if len(ignored) > 1 else 'is'} ignored: every class "
                    "is missing"
                )
        if checked["val"] == len(self.dataset("val")):
            absent = sorted(set(range(self.num_classes)) - self._seen["val"])
            notice = self.absent_notice(absent)
            lines += notice if self._seen["val"] else []  # otherwise the line above covers it
        return lines + self._reading_notices(sum(checked.values()))

    def _reading_notices(self, checked: int) -> list[str]:
        """Return notices of masks that may be meant differently than they were read."""
        lines = []
        if self._grey:
            lines.append(
                "Read as grey values: RGB masks with three equal channels, such as "
                f"{min(self._grey)}"
            )
        if self._rotated:
            lines.append(
                f"{len(self._rotated):,} of {checked:,} images are rotated by their EXIF data, but "
                f"their masks are stored upright ({first_few(sorted(self._rotated), 3)}): such a "
                "mask must fit the rotated image; if it fits the pixels as stored, remove the "
                "image's orientation (exiftool -Orientation= FILE)"
            )
        return lines

    @property
    def maps(self) -> int:
        """Number of maps per prediction: one of logits per class, at the image's size."""
        return self.num_classes

    @property
    def smallest_train_scale(self) -> Size:
        """Smallest longest and shortest edge of training images after resizing."""
        factor = min(self.scale_jitter)
        return round(self.scale[0] * factor), round(self.scale[1] * factor)

    def train_steps(self) -> list[Step]:
        """Return the steps of the training pipeline."""
        from mmcv.transforms import RandomFlip, RandomResize, Resize
        from mmseg.datasets import transforms

        steps: list[Step] = [
            StrictImage(self.smallest_train_scale, bands=self.bands),
            StrictMask(self.code),
            RandomResize(
                scale=self.scale,
                ratio_range=self.scale_jitter,
                resize_type=Resize,
                keep_ratio=True,
            ),
            transforms.RandomCrop(crop_size=self.crop_size, cat_max_ratio=self.cat_max_ratio),
        ]
        if self.flip:
            steps.append(RandomFlip(prob=self.flip))
        if self.photometric:
            steps.append(transforms.PhotoMetricDistortion())
        return [*steps, Packed(transforms.PackSegInputs())]

    def annotation_steps(self, *, annotated: bool) -> list[Step]:
        """Return the step of evaluation that reads the masks; [] if not ``annotated``."""
        return [StrictMask(self.code)] if annotated else []

    def resize_step(self, scale: Size) -> Step:
        """Return the step that resizes an image to a longest and a shortest edge."""
        from mmcv.transforms import Resize

        step: Step = Resize(scale=scale, keep_ratio=True)
        return step

    def pack_step(self) -> Step:
        """Return the last step, which packs a sample."""
        from mmseg.datasets import transforms

        return Packed(transforms.PackSegInputs())

    def _dataset(self, pairs: Sequence[Pair], steps: list[Step], test_mode: bool) -> Any:
        from mmseg.datasets import BaseSegDataset

        dataset = BaseSegDataset(
            metainfo=self.metainfo,
            reduce_zero_label=self.reduces_zero_label,
            pipeline=steps,
            test_mode=test_mode,
            lazy_init=True,
        )
        rows: list[dict[str, Any]] = [
            {
                "img_path": str(image),
                "seg_map_path": str(mask),
                "label_map": None,
                "reduce_zero_label": self.reduces_zero_label,
                "seg_fields": [],
            }
            for image, mask in pairs
        ]
        # mmseg would list the folders again, with different rules per layout.
        dataset.load_data_list = lambda: rows
        dataset.full_init()
        del dataset.load_data_list
        return dataset


def parse_colours(name: str, lists: Sequence[Sequence[int]]) -> tuple[Colour, ...]:
    """Return colours from lists of three numbers.

    Raises:
        ValueError: An item is not a colour.
    """
    colours: list[Any] = []
    for place, colour in enumerate(lists):
        values = () if isinstance(colour, str) else integer_list(f"data.{name}[{place}]", colour)
        valid = len(values) == 3 and all(0 <= value <= 255 for value in values)
        rule = "red, green and blue from 0 to 255, such as [128,0,0]"
        colours.append(check_option(f"{name}[{place}]", values or colour, valid, rule))
    return tuple(colours)
