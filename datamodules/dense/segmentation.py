"""Semantic segmentation: what all layouts of images and masks share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from datamodules.base import SPLITS, Split, probability, range_of
from datamodules.dense.masks import Code, MaskCode, StrictMask, refuse_misread, refuse_other_shape
from datamodules.dense.toolkit_data import (
    DenseDataModule,
    Packed,
    Size,
    Step,
    StrictImage,
    refuse_thin,
    size_of,
)
from datamodules.files import UPRIGHT, first_few
from datamodules.files.headers import read_header
from datamodules.files.mask_colours import IGNORED, Colour, ColourCode
from datamodules.files.whole_numbers import shown, whole_list
from datamodules.loading.sampling import SeededDataset


class Pair(NamedTuple):
    """An image and its mask."""

    image: Path
    mask: Path


Pairs = Mapping[Split, Sequence[Pair]]


class SegmentationDataModule(DenseDataModule):
    """Images with masks of labels; a subclass finds them in ``pairs`` and says their ``code``.

    Args:
        root: Folder of the dataset.
        scale: Longest and shortest edge an image is resized into, its shape kept.
        crop_size: Height and width of a training crop.
        scale_jitter: Smallest and largest factor by which ``scale`` is scaled in training.
        cat_max_ratio: A training crop is drawn anew while one class fills more than this share.
        flip: Probability of a horizontal flip; digits and letters want 0.
        photometric: Distort brightness, contrast and colour in training.
        colors: RGB values of each class in masks whose colours are the labels; None for masks
            whose values are.
        ignored_colors: RGB values of pixels that do not count, in such masks; None for no such.
        batch_size: Samples per training batch and process.
        **options: Of ``DenseDataModule``.

    Attributes:
        code: What the values or colours of the masks mean; known after ``setup``.
        two_values: What to do about masks of two classes that hold only 0 and 255.
        reduces_zero_label: Whether mmseg is to be told that label 0 is ignored.
    """

    package = "mmseg.datasets"
    code: Code
    reduces_zero_label = False
    two_values = "pass the folders by data=segmentation_folder and data.values=[0,255]"

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
        self.scale = size_of("scale", scale)
        self.crop_size = size_of("crop_size", crop_size)
        self.scale_jitter = range_of("scale_jitter", scale_jitter)
        self.cat_max_ratio, self.photometric = cat_max_ratio, photometric
        self.flip = probability("flip", flip)
        self.check_scales(self.scale, self.crop_size)
        self.colors = None if colors is None else colours_of("colors", colors)
        self.ignored_colors = colours_of("ignored_colors", ignored_colors or ())
        if self.ignored_colors and self.colors is None:
            raise ValueError("data.ignored_colors is for masks in colours; pass data.colors too")
        if len({*(self.colors or ()), *self.ignored_colors}) < (
            len(self.colors or ()) + len(self.ignored_colors)
        ):
            raise ValueError("data.colors and data.ignored_colors must be different colours")
        self._seen: dict[Split, set[int]] = {}  # labels that count in the masks looked at
        self._turned: list[str] = []  # images with another EXIF orientation than their masks
        self._grey: list[str] = []  # masks with three equal channels

    @property
    def metainfo(self) -> dict[str, Any]:
        """The classes and their colours: those of the masks, of the data set, or any."""
        info = super().metainfo
        if self.colors is not None and len(self.colors) == self.num_classes:
            return info | {"palette": [list(colour) for colour in self.colors]}
        known = self.known_metainfo()
        return known if list(self.class_names) == list(known.get("classes", ())) else info

    def known_metainfo(self) -> dict[str, Any]:
        """Names and colours of the layout's own classes, if it has such."""
        return {}

    @abstractmethod
    def pairs(self) -> Pairs:
        """Check the folders; set ``class_names``, ``category_ids`` and ``code``."""
        raise NotImplementedError

    def build(self) -> dict[Any, SeededDataset]:
        """Check the folders and wrap mmseg's datasets."""
        pairs = self.pairs()
        masks = [pair.mask for split in SPLITS for pair in pairs[split]]
        assert isinstance(self.code, MaskCode)
        if self.colors is None:
            refuse_misread(masks, self.code, self.two_values)
        else:
            self.code = self._colour_code(self.colors, self.code)
        return {
            "train": self.wrap(self._dataset(pairs["train"], self.train_steps(), False)),
            "val": self.wrap(self._dataset(pairs["val"], self.test_steps(), True)),
        }

    def _colour_code(self, colors: tuple[Colour, ...], code: MaskCode) -> ColourCode:
        if len(colors) != self.num_classes:
            raise ValueError(
                f"data.colors has {len(colors)} colours, but there are {self.num_classes} classes "
                f"({first_few(self.class_names)}); give one colour for each"
            )
        return ColourCode(colors, self.ignored_colors, code.values)

    def file_check(self, split: Split) -> Callable[[int], None]:
        """Header and end of an image and its mask; the labels in the masks of validation too.

        In training masks are decoded until one has a label that counts.
        """
        dataset: Any = self.dataset(split).dataset
        strict = StrictMask(self.code)
        seen = self._seen[split] = set()

        def check(index: int) -> None:
            info = dataset.get_data_info(index)
            image, mask = info["img_path"], info["seg_map_path"]
            width, height, orientation = read_header(image, upright=True)
            own = read_header(mask, upright=True)
            if UPRIGHT != orientation != own.orientation:
                self._turned.append(image)
            refuse_other_shape(mask, (own.height, own.width), (height, width), image)
            scale = self.smallest_train_scale if split == "train" else self.scale
            refuse_thin(image, (width, height), scale)
            if split == "val" or not seen:
                pixels = strict.pixels(mask)
                if pixels.ndim == 3 and isinstance(self.code, MaskCode):
                    self._grey.append(mask)
                seen.update(set(np.unique(self.code.labels(pixels, mask)).tolist()) - {IGNORED})

        return check

    def notices(self, looked: Mapping[Split, int]) -> list[str]:
        """Masks in which nothing counts, classes that validation lacks, and how masks were read."""
        lines = super().notices(looked)
        ignored = self.code.ignored
        listed = " and ".join(map(str, ignored)) if 0 < len(ignored) < 3 else "labels"
        for split, name in SPLITS.items():
            if looked[split] and not self._seen[split]:
                lines.append(
                    f"All {looked[split]:,} {name} masks that were looked at hold nothing but "
                    f"{listed}, which {'are' if len(ignored) > 1 else 'is'} ignored: there is "
                    "nothing to learn or to score"
                )
        if looked["val"] == len(self.dataset("val")):
            absent = sorted(set(range(self.num_classes)) - self._seen["val"])
            said = self.absent_notice(absent)
            lines += said if self._seen["val"] else []  # where there is none, it is said above
        return lines + self._reading_notices(sum(looked.values()))

    def _reading_notices(self, looked: int) -> list[str]:
        """How masks were read, where they may be meant otherwise."""
        lines = []
        if self._grey:
            lines.append(
                "Read as grey values: masks in RGB whose channels are equal, such as "
                f"{min(self._grey)}"
            )
        if self._turned:
            lines.append(
                f"{len(self._turned):,} of {looked:,} images are turned by their EXIF data, and "
                f"their masks are not ({first_few(sorted(self._turned), 3)}): such a mask must fit "
                "the turned image; if it fits the pixels as stored, remove the image's "
                "orientation (exiftool -Orientation= FILE)"
            )
        return lines

    @property
    def maps(self) -> int:
        """The logits of each class, at the size of an image."""
        return self.num_classes

    @property
    def smallest_train_scale(self) -> Size:
        """The smallest longest and shortest edge that training images are resized into."""
        factor = min(self.scale_jitter)
        return round(self.scale[0] * factor), round(self.scale[1] * factor)

    def train_steps(self) -> list[Step]:
        """The training pipeline."""
        from mmcv.transforms import RandomFlip, RandomResize, Resize
        from mmseg.datasets import transforms

        steps: list[Step] = [
            StrictImage(self.smallest_train_scale),
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

    def masks(self, *, annotated: bool) -> list[Step]:
        """The step of an evaluation that reads the masks, if there are any."""
        return [StrictMask(self.code)] if annotated else []

    def resized(self, scale: Size) -> Step:
        """The step that resizes an image into a longest and a shortest edge."""
        from mmcv.transforms import Resize

        step: Step = Resize(scale=scale, keep_ratio=True)
        return step

    def packed(self) -> Step:
        """The last step."""
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
        # mmseg would list the folders a second time, each layout in a way of its own.
        dataset.load_data_list = lambda: rows
        dataset.full_init()
        del dataset.load_data_list
        return dataset


def colours_of(name: str, given: Sequence[Sequence[int]]) -> tuple[Colour, ...]:
    """Colours given as lists of three numbers.

    Raises:
        ValueError: One is not a colour.
    """
    colours = []
    for place, colour in enumerate(given):
        values = () if isinstance(colour, str) else whole_list(f"data.{name}[{place}]", colour)
        if len(values) != 3 or not all(0 <= value <= 255 for value in values):
            raise ValueError(
                f"data.{name}[{place}] must be red, green and blue from 0 to 255, such as "
                f"[128,0,0], got {shown(colour)}"
            )
        colours.append(values)
    return tuple(colours)
