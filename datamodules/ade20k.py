"""ADE20K scene parsing: semantic segmentation from folders of JPEGs and masks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.base import SPLITS, Split, probability, range_of
from datamodules.dense import (
    DenseDataModule,
    Results,
    Size,
    Step,
    StrictImage,
    size_of,
)
from datamodules.files import decode, first_few, list_images, require_folder, require_names
from datamodules.headers import check_header
from datamodules.sampling import SeededDataset

ARCHIVE_FOLDER = "ADEChallengeData2016"
IGNORED = 255
FOLDERS = {"train": "training", "val": "validation"}


class StrictMask:
    """Reads ``seg_map_path``, checks it and turns label 0 into "ignored", so class 1 becomes 0.

    Gives what mmseg's LoadAnnotations gives for a sound mask, else an error that names the file.

    Args:
        num_classes: Highest label a mask may hold; 255 is ignored.
    """

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes

    def __call__(self, results: Results) -> Results:
        """Add ``gt_seg_map`` (H, W), uint8."""
        path = results["seg_map_path"]
        image = decode(path)
        if image.mode not in ("L", "P"):
            raise ValueError(
                f"mask {path} has pixels of mode {image.mode}; "
                "save labels as an 8-bit grey or palette PNG"
            )
        labels = np.asarray(image)
        refuse_other_shape(path, labels.shape, results["ori_shape"])
        wrong = np.unique(labels[(labels > self.num_classes) & (labels != IGNORED)])
        if wrong.size:
            raise ValueError(
                f"mask {path} holds labels {wrong.tolist()}, but {self.num_classes} classes are "
                f"labelled 1 to {self.num_classes}, and 0 means ignored (reduce_zero_label)"
            )
        # 0 wraps around to 255; 255 stays.
        results["gt_seg_map"] = np.where(labels == IGNORED, labels, labels - 1).astype(np.uint8)
        results["seg_fields"].append("gt_seg_map")
        return results


def refuse_other_shape(mask: object, shape: tuple[int, ...], image: Size) -> None:
    """Raise an error unless a mask has the height and width of its image."""
    if shape != image:
        raise ValueError(f"mask {mask} is {shape} (height, width), but its image is {image}")


class ADE20KDataModule(DenseDataModule):
    """Any set in the layout of ADEChallengeData2016: label 0 is ignored, class i has label i + 1.

    The classes are ADE20K's 150, unless ``root`` holds a ``class_names.txt`` with one name a line.

    Args:
        root: Folder that holds ``images`` and ``annotations``, or the folder that holds that one.
        scale: Longest and shortest edge an image is resized into, its shape kept.
        crop_size: Height and width of a training crop.
        scale_jitter: Smallest and largest factor by which ``scale`` is scaled in training.
        cat_max_ratio: A training crop is drawn anew while one class fills more than this share.
        flip: Probability of a horizontal flip; digits and letters want 0.
        photometric: Distort brightness, contrast and colour in training.
        batch_size: Samples per training batch and process.
        **options: Of ``BaseDataModule``.
    """

    layout = "images/training, images/validation, annotations/training and annotations/validation"
    example = f"data=ade20k data.root=/data/{ARCHIVE_FOLDER}"
    package = "mmseg.datasets"

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

    @property
    def metainfo(self) -> dict[str, Any]:
        """The classes and their colours; ADE20K's own colours for its own classes."""
        known = ade20k_metainfo()
        if list(self.class_names) == list(known["classes"]):
            return known
        return super().metainfo

    def build(self) -> dict[Any, SeededDataset]:
        """Check the folders and wrap mmseg's datasets."""
        folder = self.folder
        if (folder / ARCHIVE_FOLDER).is_dir():
            folder = folder / ARCHIVE_FOLDER
        for split in FOLDERS.values():
            check_pairs(folder / "images" / split, folder / "annotations" / split)
        self.class_names = class_names(folder)
        self.category_ids = pixel_values(self.num_classes)
        return {
            "train": self.wrap(self._dataset(folder, FOLDERS["train"], self.train_steps(), False)),
            "val": self.wrap(self._dataset(folder, FOLDERS["val"], self.test_steps(), True)),
        }

    def predict_only(self, class_names: Sequence[str], category_ids: Sequence[int] = ()) -> None:
        """Know the classes from elsewhere and serve prediction, so that no data set is needed."""
        super().predict_only(class_names, category_ids or pixel_values(len(class_names)))

    def file_check(self, split: Split) -> Callable[[int], None]:
        """Header and end of an image and its mask; the labels in the masks of validation too.

        In training masks are decoded until one has a label that counts.
        """
        dataset: Any = self.dataset(split).dataset
        strict = StrictMask(self.num_classes)
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
        for split, name in SPLITS.items():
            if looked[split] and not self._seen[split]:
                lines.append(
                    f"All {looked[split]:,} {name} masks that were looked at hold nothing but 0 "
                    f"and {IGNORED}, which are ignored: there is nothing to learn or to score"
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
            StrictMask(self.num_classes),
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
        return [*steps, transforms.PackSegInputs()]

    def test_steps(self, *, annotated: bool = True) -> list[Step]:
        """The evaluation pipeline; masks keep the original size, on which the metric is taken."""
        from mmcv.transforms import Resize
        from mmseg.datasets import transforms

        masks: list[Step] = [StrictMask(self.num_classes)] if annotated else []
        resize: Step = Resize(scale=self.scale, keep_ratio=True)
        return [StrictImage(), resize, *masks, transforms.PackSegInputs()]

    def _dataset(self, folder: Path, split: str, steps: list[Step], test_mode: bool) -> Any:
        from mmseg.datasets import BaseSegDataset

        return BaseSegDataset(
            data_prefix={
                "img_path": str(folder / "images" / split),
                "seg_map_path": str(folder / "annotations" / split),
            },
            metainfo=self.metainfo,
            reduce_zero_label=True,
            pipeline=steps,
            test_mode=test_mode,
        )


def pixel_values(num_classes: int) -> tuple[int, ...]:
    """What a mask holds where the classes are; 0 is ignored."""
    return tuple(range(1, num_classes + 1))


def ade20k_metainfo() -> dict[str, Any]:
    """Names and colours of ADE20K's 150 classes."""
    from mmseg.datasets import ADE20KDataset

    return dict(ADE20KDataset.METAINFO)


def class_names(folder: Path) -> tuple[str, ...]:
    """The names in ``class_names.txt``, or ADE20K's where there is no such file."""
    file = folder / "class_names.txt"
    if not file.is_file():
        return tuple(ade20k_metainfo()["classes"])
    names = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not names or len(names) > IGNORED - 1 or len(set(names)) < len(names):
        raise ValueError(
            f"{file} must hold 1 to {IGNORED - 1} different class names, one a line; "
            f"found {first_few(names)}"
        )
    return tuple(names)


def check_pairs(images: Path, masks: Path) -> None:
    """Raise an error unless each image (.jpg) has its mask (.png) and the other way round."""
    for folder in (images, masks):
        require_folder(folder, f"an ADE20K folder has {ADE20KDataModule.layout}")
    image_stems = {name[:-4] for name in list_images(images) if name.endswith(".jpg")}
    mask_stems = {name[:-4] for name in list_images(masks) if name.endswith(".png")}
    if not image_stems:
        raise ValueError(
            f"no .jpg images in {images}; an ADE20K folder has {ADE20KDataModule.layout}"
        )
    require_names(
        {str(masks / f"{stem}.png") for stem in image_stems - mask_stems},
        f"images in {images} lack their masks",
        "add the masks or remove the images",
    )
    require_names(
        {str(images / f"{stem}.jpg") for stem in mask_stems - image_stems},
        f"masks in {masks} lack their images",
        "add the images or remove the masks",
    )
