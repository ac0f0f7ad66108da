"""Folders of images and masks with a list of classes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.annotation_formats.mask_exports import AUTO, OWN, Layout, Masks, open_masks
from datamodules.annotation_formats.splits import (
    SplitOptions,
    choose,
    draw_notice,
    draw_with_classes,
)
from datamodules.base import SPLITS, Split
from datamodules.dense.masks import (
    NAMES_RULE,
    MaskCode,
    StrictMask,
    are_names,
    consecutive_code,
    read_class_names,
)
from datamodules.dense.segmentation import Pair, Pairs, SegmentationDataModule
from datamodules.files.bands import BAND_SUFFIXES
from datamodules.files.console import log
from datamodules.files.folders import (
    VALIDATION,
    file_suffix,
    first_few,
    list_images,
    require_folder,
    require_names,
    skipped_notice,
    validation_folder,
)
from datamodules.files.mask_colours import IGNORED
from datamodules.files.text_files import nfc
from datamodules.files.values import check_option, integer_list, refuse

NAMES = "class_names.txt"
LOSSLESS = (".png", ".bmp", ".tif", ".tiff")


class SegmentationFolderDataModule(SegmentationDataModule):
    """Images and masks of equal names; a mask's pixel is its class's number, from 0 on.

    Layout: ``images/{train,val}/*``, ``masks/{train,val}/*.png`` and ``class_names.txt``, or the
    export of an annotation tool. Images and masks may lie in equal sub-folders. ``images/valid``
    replaces a missing ``images/val``.

    Args:
        root: Folder that holds the others.
        layout: "folder" for the paths below, "roboflow" or "cvat" for an export, or "auto" to
            recognise one where ``train_images`` is missing.
        train_split: Split of an export to train with; None for the usual name.
        val_split: Split of an export to validate with; None for the usual name.
        val_share: Share of the training images to validate with, if an export has one split.
        split_seed: Seed of the draw of these images.
        train_images: Folder of the training images, relative to ``root``.
        train_masks: Folder of their masks. Grey values or palette indices are the labels; with
            ``colors``, colours are.
        val_images: Folder of the validation images.
        val_masks: Folder of their masks.
        mask_suffix: Suffix of a mask's name after its image's name, before the ending: _mask.
        classes: Class names; None reads the lines of ``class_names.txt`` in ``root``.
        values: Mask value per class; None means 0, 1, 2, ...
        ignored: Values of ignored pixels, besides 255.
        bands: Number of bands of each file, or a list of the bands to use, from 0 on: images of any
            depth with 1 to 12 bands, as stored. None reads 8-bit RGB.
        band_mean: Mean per band, subtracted; None computes it from the training images.
        band_std: Standard deviation per band, divided by; None computes it likewise.
        **options: Options of ``SegmentationDataModule``.
    """

    layout = f"images/train, images/val, masks/train, masks/val and {NAMES}"
    example = "data=segmentation_folder data.root=/data/maps"

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        layout: Layout = AUTO,
        train_split: str | None = None,
        val_split: str | None = None,
        val_share: float = 0.1,
        split_seed: int = 0,
        train_images: str = "images/train",
        train_masks: str = "masks/train",
        val_images: str = "images/val",
        val_masks: str = "masks/val",
        mask_suffix: str = "",
        classes: Sequence[str] | None = None,
        values: Sequence[int] | None = None,
        ignored: Sequence[int] = (),
        bands: int | Sequence[int] | None = None,
        band_mean: Sequence[float] | None = None,
        band_std: Sequence[float] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(root, **options)
        self.set_bands(bands, band_mean, band_std)
        rgb = self.bands is None or not self.photometric
        check_option("photometric", True, rgb, "false with data.bands")
        self.chosen_layout = layout
        self.splits = SplitOptions(train_split, val_split, val_share, split_seed)
        self.folders: dict[Split, tuple[str, str]] = {
            "train": (train_images, train_masks),
            "val": (val_images, val_masks),
        }
        self.mask_suffix = mask_suffix
        self.classes = None if classes is None else tuple(map(nfc, classes))
        self.values = None if values is None else integer_list("data.values", values)
        self.ignored = integer_list("data.ignored", ignored)
        either = "pass data.values=[0,255], or [0,1] if 255 means ignored"
        self.two_values = either if values is None else ""
        for name, numbers in (("values", self.values or ()), ("ignored", self.ignored)):
            inside = all(0 <= number <= IGNORED for number in numbers)
            check_option(name, [*numbers], inside, f"numbers from 0 to {IGNORED}")
        is_alone = self.colors is None or (self.values is None and not self.ignored)
        rule = "null with data.values or data.ignored; pass data.colors and ignored_colors alone"
        check_option("colors", self.colors, is_alone, rule)

    def pairs(self) -> Pairs:
        """Pair images with masks and read the class names."""
        export = self._export()
        if export is not None:
            return self._export_pairs(export)
        self.class_names = self._names()
        self.code = self._code()
        self.category_ids = self.code.values
        return {
            split: self._paired(self._place(images), self._place(masks))
            for split, (images, masks) in self.folders.items()
        }

    def _export(self) -> Masks | None:
        """Return the export in the folder; None for folders of images and masks."""
        has_folder = (self.folder / self.folders["train"][0]).is_dir()
        if self.chosen_layout == OWN or (self.chosen_layout == AUTO and has_folder):
            return None
        export = open_masks(self.folder, self.chosen_layout)
        options = {"classes": self.classes, "values": self.values, "colors": self.colors}
        option_names = [name for name, value in options.items() if value is not None]
        if export is not None:
            rule = "defines classes and mask values; leave out"
            refuse(export.title, {rule: [f"data.{name}" for name in option_names]})
        return export

    def _export_pairs(self, export: Masks) -> Pairs:
        self.class_names = export.names
        self.values, self.colors = export.values or None, export.colours or None
        self.code = self._code()
        self.category_ids = self.code.values
        choice = choose(list(export.splits), self.splits, export.title)
        pairs = [Pair(*pair) for pair in export.splits[choice.train]]
        unused = first_few(choice.unused)
        remark = f"; unused: {unused} (data.val_split=<name> validates with it)" if unused else ""
        if choice.val is not None:
            val = [Pair(*pair) for pair in export.splits[choice.val]]
            log(
                f"{export.title}: {len(pairs)} training images in {choice.train}, {len(val)} "
                f"validation images in {choice.val}{remark}"
            )
            return {"train": pairs, "val": val}
        names = [pair.image.relative_to(export.root).as_posix() for pair in pairs]
        masks = {name: pair.mask for name, pair in zip(names, pairs, strict=True)}
        code = self.code if self.colors is None else self._colour_code(self.colors, self._code())
        strict = StrictMask(code)

        def labels(name: str) -> set[int]:
            values = np.unique(code.labels(strict.pixels(masks[name]), masks[name]))
            return {*values.tolist()} - {IGNORED}

        validating = draw_with_classes(names, self.splits, self.num_classes, labels, export.title)
        log(f"{export.title}: {draw_notice(len(validating), len(names), self.splits)}{remark}")
        return {
            split: [
                p
                for n, p in zip(names, pairs, strict=True)
                if (n in validating) == (split == "val")
            ]
            for split in SPLITS
        }

    def _place(self, name: str) -> Path:
        """Return a folder of the dataset; for ``val`` the existing validation folder."""
        folder = self.folder / name
        return validation_folder(folder.parent) if folder.name == VALIDATION[0] else folder

    def predict_only(self, class_names: Sequence[str], category_ids: Sequence[int] = ()) -> None:
        """Set the classes and serve prediction alone, without reading a dataset."""
        super().predict_only(class_names, category_ids or self.values or range(len(class_names)))

    def _names(self) -> tuple[str, ...]:
        if self.classes is not None:
            check_option("classes", [*self.classes], are_names(self.classes), NAMES_RULE)
            return self.classes
        file = self.folder / NAMES
        remedy = "write one class name per line, or pass data.classes=[background,road,...]"
        require_names([] if file.is_file() else [str(file)], "file does not exist", remedy)
        return read_class_names(file)

    def _code(self) -> MaskCode:
        number = self.num_classes
        values = tuple(range(number)) if self.values is None else self.values
        differ = len(values) == number == len({*values}) and not {*self.ignored} & {*values}
        rule = f"{number} different numbers, one per class, outside data.ignored={[*self.ignored]}"
        check_option("values", [*values], differ, rule)
        if self.values is None:
            code = consecutive_code(number, first=0, ignored=self.ignored)
            remark = "; for masks with other labels pass data.values, one per class"
            return replace(code, meaning=code.meaning + remark)
        ignored = tuple(sorted({*self.ignored, IGNORED} - {*values}))
        meaning = f"the classes have data.values={list(values)}"
        meaning += f", and {list(ignored)} are ignored" if ignored else ""
        if values == (0, IGNORED):
            meaning += "; 1-bit masks have 0 and 1: save all with 8 bits, or pass [0,1]"
        return MaskCode(values, ignored, meaning)

    def _paired(self, images: Path, masks: Path) -> list[Pair]:
        for folder in (images, masks):
            require_folder(folder, f"the dataset needs {self.layout}, or other folders in options")
        image_of = index_by_stem(images, list_files(images, self.suffixes))
        mask_of = index_by_stem(masks, list_files(masks, LOSSLESS))
        refuse(images, {f"holds no images; the dataset needs {self.layout}": not image_of})
        mask_names = {stem: f"{stem}{self.mask_suffix}" for stem in image_of}
        require_names(
            {str(masks / f"{mask}.png") for mask in mask_names.values() if mask not in mask_of},
            f"images in {images} lack their masks",
            "add the masks, remove the images, or pass the end of masks' names as data.mask_suffix",
        )
        require_names(
            {str(masks / mask_of[mask]) for mask in mask_of.keys() - set(mask_names.values())},
            f"masks in {masks} lack their images",
            "add the images or remove the masks",
        )
        return [
            Pair(images / image_of[s], masks / mask_of[m]) for s, m in sorted(mask_names.items())
        ]


def list_files(folder: Path, suffixes: Collection[str]) -> list[str]:
    """Return the files with one of the endings; log the number of others."""
    skipped: Counter[str] = Counter()
    names = list_images(folder, skipped, BAND_SUFFIXES)
    skipped.update(file_suffix(name) for name in names if file_suffix(name) not in suffixes)
    for line in skipped_notice(folder, skipped):
        log(line)
    return [name for name in names if file_suffix(name) in suffixes]


def index_by_stem(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Return the file names of a folder, keyed by their names without endings.

    Raises:
        ValueError: Two files differ only in their endings.
    """
    by_stem = {nfc(str(Path(name).with_suffix(""))): name for name in names}
    rule = "has files that differ only in their endings or the form of accents (remove one of each)"
    refuse(folder, {rule: sorted(set(names) - set(by_stem.values()))})
    return by_stem
