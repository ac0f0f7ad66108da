"""Semantic segmentation: what all layouts of images and masks share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from datamodules.base import SPLITS, Split, probability, range_of
from datamodules.dense import DenseDataModule, Packed, Size, Step, StrictImage, size_of
from datamodules.headers import check_header
from datamodules.masks import IGNORED, MaskCode, StrictMask, refuse_other_shape
from datamodules.sampling import SeededDataset


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
        batch_size: Samples per training batch and process.
        **options: Of ``DenseDataModule``.

    Attributes:
        code: What the values of the masks mean; known after ``setup``.
        reduces_zero_label: Whether mmseg is to be told that label 0 is ignored.
    """

    package = "mmseg.datasets"
    code: MaskCode
    reduces_zero_label = False

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
        batch_size: int = 4,
        **options: Any,
    ) -> None:
        super().__init__(root, batch_size=batch_size, **options)
        self.scale = size_of("scale", scale)
        self.crop_size = size_of("crop_size", crop_size)
        self.scale_jitter = range_of("scale_jitter", scale_jitter)
        self.cat_max_ratio, self.photometric = cat_max_ratio, photometric
        self.flip = probability("flip", flip)
        self._seen: dict[Split, set[int]] = {}  # labels that count in the masks looked at

    @abstractmethod
    def pairs(self) -> Pairs:
        """Check the folders; set ``class_names``, ``category_ids`` and ``code``."""
        raise NotImplementedError

    def build(self) -> dict[Any, SeededDataset]:
        """Check the folders and wrap mmseg's datasets."""
        pairs = self.pairs()
        return {
            "train": self.wrap(self._dataset(pairs["train"], self.train_steps(), False)),
            "val": self.wrap(self._dataset(pairs["val"], self.test_steps(), True)),
        }

    def file_check(self, split: Split) -> Callable[[int], None]:
        """Header and end of an image and its mask; the labels in the masks of validation too.

        In training masks are decoded until one has a label that counts.
        """
        dataset: Any = self.dataset(split).dataset
        strict = StrictMask(self.code)
        seen = self._seen[split] = set()

        def check(index: int) -> None:
            info = dataset.get_data_info(index)
            width, height = check_header(info["img_path"], upright=True)
            mask = info["seg_map_path"]
            refuse_other_shape(mask, check_header(mask)[::-1], (height, width))
            if split == "val" or not seen:
                found = {"seg_map_path": mask, "ori_shape": (height, width), "seg_fields": []}
                seen.update(set(np.unique(strict(found)["gt_seg_map"]).tolist()) - {IGNORED})

        return check

    def notices(self, looked: Mapping[Split, int]) -> list[str]:
        """Masks in which nothing counts, and classes that no mask of validation has."""
        lines = super().notices(looked)
        ignored = self.code.ignored
        listed = " and ".join(map(str, ignored)) if len(ignored) < 3 else "labels"
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
        return lines

    def train_steps(self) -> list[Step]:
        """The training pipeline."""
        from mmcv.transforms import RandomFlip, RandomResize, Resize
        from mmseg.datasets import transforms

        steps: list[Step] = [
            StrictImage(),
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
