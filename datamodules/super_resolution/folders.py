"""Folders of high-resolution images, with or without low-resolution ones beside them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datamodules.base import Split
from datamodules.files.console import log
from datamodules.files.folders import (
    first_few,
    list_folders,
    list_images,
    require_folder,
    require_names,
    validation_folder,
)
from datamodules.files.values import check_option, refuse
from datamodules.loading.sampling import NamedDataset, SeededDataset
from datamodules.super_resolution.base import SuperResolutionDataModule
from datamodules.super_resolution.pairs import Pair, WholeImages

# Names of the folder of high-resolution images within a set. BasicSR shrinks GTmod12, whose sides
# are multiples of 12, and not its original.
HIGH = ("HR", "GT", "GTmod12", "original")
# Small images: paths below the set's folder and names of files, in any case and punctuation.
LOW = re.compile(r"lr(?:bi|bic|bicubic)?x([2-9])")
UNREAD = re.compile(r"lr[a-z]*(?:x[2-9])?")
SMALL = ("{0}x{1}", "{0}", "{0}_x{1}", "{0}_LR_x{1}", "{0}_LRBI_x{1}")  # of stem and scale
VALIDATION = range(801, 901)  # numbers of DIV2K's validation images
COUNTS = {"Set5": 5, "Set14": 14, "B100": 100, "Urban100": 100, "Manga109": 109}
SETS = {name.lower(): name for name in COUNTS}
OTHER_NAMES = {"b100": ("BSD100", "BSDS100")}


class ImageFolderSRDataModule(SuperResolutionDataModule):
    """Any images: ``train`` and ``val``, or one folder of which a share is validated.

    Layout: each folder has the images, or ``HR`` with the images and ``LR_bicubic/X2``, ``X3`` and
    ``X4`` with their small ones, named ``0001x4.png`` for ``0001.png``. BasicSR's ``GTmod12`` and
    ``LRbicx4`` and RCAN's ``LRBI/x4`` are read, too. Without small images the large ones are shrunk
    as by MATLAB's imresize.

    Args:
        root: The folder.
        val_share: Share of the images to validate without a folder ``val``, the last by name.
        **options: Options of ``SuperResolutionDataModule``.
    """

    layout = "train and val with images, or one folder of images"
    example = "data=image_folder data.root=/data/photos"

    def __init__(
        self, root: str | Path | None = None, *, val_share: float = 0.1, **options: Any
    ) -> None:
        super().__init__(root, **options)
        check_option("val_share", val_share, 0 < val_share < 1, "between 0 and 1")
        self.val_share = val_share

    def pairs(self) -> tuple[Sequence[Pair], Sequence[Pair]]:
        """Return the images of both folders, or of one folder in two parts."""
        if (self.folder / "train").is_dir():
            val = validation_folder(self.folder)
            require_folder(val, "add it beside train")
            return tuple(find_pairs(path, self.scale) for path in (self.folder / "train", val))  # type: ignore[return-value]
        all_pairs = find_pairs(self.folder, self.scale)
        count = math.ceil(self.val_share * len(all_pairs))
        rule = (
            f"has {len(all_pairs)} images, of which data.val_share={self.val_share} leaves none to "
            "train with; add images, or lower it"
        )
        refuse(self.folder, {rule: count == len(all_pairs)})
        return all_pairs[:-count], all_pairs[-count:]


class DIV2KDataModule(SuperResolutionDataModule):
    """DIV2K: 800 training images, 100 validation images.

    Layout: ``DIV2K_train_HR`` and ``DIV2K_valid_HR``, with or without ``DIV2K_train_LR_bicubic/X4``
    and ``DIV2K_valid_LR_bicubic/X4``, as published. A training folder of all 900 images is
    accepted: 801 to 900 are validated.

    Source: Agustsson and Timofte, "NTIRE 2017 Challenge", https://data.vision.ee.ethz.ch/cvl/DIV2K.
    """

    layout = "DIV2K_train_HR and DIV2K_valid_HR"
    example = "data=div2k data.root=/data/DIV2K"

    def pairs(self) -> tuple[Sequence[Pair], Sequence[Pair]]:
        """Return the images of both folders."""
        folder = self.folder / "DIV2K" if (self.folder / "DIV2K").is_dir() else self.folder
        train = self._published(folder, "DIV2K_train")
        if not (folder / "DIV2K_valid_HR").is_dir():
            val = [pair for pair in train if _number(pair) in VALIDATION]
            if not val:
                require_folder(folder / "DIV2K_valid_HR", f"the set has {self.layout}")
            return [pair for pair in train if pair not in val], val
        return train, self._published(folder, "DIV2K_valid")

    def _published(self, folder: Path, name: str) -> list[Pair]:
        high = folder / f"{name}_HR"
        require_folder(high, f"the set has {self.layout}")
        return match_pairs(high, folder / f"{name}_LR_bicubic" / f"X{self.scale}", self.scale)


class DF2KDataModule(DIV2KDataModule):
    """DIV2K and Flickr2K together; validation is DIV2K's.

    Layout: that of DIV2K, and ``Flickr2K_HR`` (with ``Flickr2K_LR_bicubic/X4``), all in one folder
    or in folders ``DIV2K`` and ``Flickr2K``.
    """

    layout = "DIV2K_train_HR, DIV2K_valid_HR and Flickr2K_HR"
    example = "data=df2k data.root=/data/DF2K"

    def pairs(self) -> tuple[Sequence[Pair], Sequence[Pair]]:
        """Return the training images of both sets, and DIV2K's validation images."""
        train, val = super().pairs()
        inner = self.folder / "Flickr2K"
        folder = inner if inner.is_dir() else self.folder
        return [*train, *self._published(folder, "Flickr2K")], val


class BenchmarkDataModule(SuperResolutionDataModule):
    """Set5, Set14, B100, Urban100 and Manga109, to evaluate one by one.

    Layout: a folder per set, or the folder of one; each has images, or ``HR`` with images and
    ``LR_bicubic/X4`` with small ones.

    Args:
        root: The folder.
        sets: Names of the sets, of ``SETS``.
        published_counts: Require the published number of images per set.
        **options: Options of ``SuperResolutionDataModule``.
    """

    layout = "a folder per set: Set5, Set14, B100, Urban100, Manga109"
    example = "mode=test data=sr_benchmark data.root=/data/benchmark"

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        sets: Sequence[str] = tuple(SETS),
        published_counts: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(root, **options)
        valid = sets and set(sets) <= SETS.keys()
        check_option("sets", [*sets], valid, f"sets of {', '.join(SETS)}")
        self.sets, self.published_counts = tuple(sets), published_counts

    def pairs(self) -> tuple[Sequence[Pair], Sequence[Pair]]:
        """Return the images of all sets, which are for evaluation only."""
        return [], [pair for _, part in self.parts for pair in part]

    def build(self) -> dict[Split, SeededDataset]:
        """Find the sets; the first one is chosen."""
        self.parts = [(name, self._find(name)) for name in self.sets]
        self.choose(self.sets[0])
        return {"val": self._datasets["val"]}  # type: ignore[dict-item]

    def dataset(self, split: Split) -> NamedDataset:
        """Return the images of the chosen set, which is for evaluation only."""
        rule = "has images for evaluation only: pass mode=test ckpt=<run folder>, or train with"
        refuse(", ".join(self.sets), {f"{rule} data=div2k": split == "train"})
        return super().dataset(split)

    def choose(self, name: str) -> None:
        """Evaluate one of the sets from now on."""
        images = WholeImages(dict(self.parts)[name], self.scale)
        self._datasets["val"] = self.seeded(images, images.path)

    def _find(self, name: str) -> list[Pair]:
        names = (SETS[name], *OTHER_NAMES.get(name, ()))
        lower_names = {path.lower() for path in names}
        folders = [
            self.folder / path for path in list_folders(self.folder) if path.lower() in lower_names
        ]
        is_single = len(self.sets) == 1 and (self.folder.name.lower() in lower_names or not folders)
        lost = [] if folders or is_single else [names[0]]
        require_names(lost, f"folder is missing in {self.folder}", "add it")
        folder = self.folder if is_single else folders[0]
        pairs = find_pairs(folder, self.scale)
        count = COUNTS[SETS[name]]
        rule = (
            f"has {len(pairs)} images, but {SETS[name]} has {count}; complete it, or pass "
            "data.published_counts=false"
        )
        refuse(folder, {rule: self.published_counts and len(pairs) != count})
        return pairs


def find_pairs(folder: Path, scale: int) -> list[Pair]:
    """Return the images of a folder, or of its ``HR`` with their small ones, by name.

    Raises:
        ValueError: Small images lie in a folder of an unknown name among the large ones.
    """
    high = next((folder / name for name in HIGH if (folder / name).is_dir()), folder)
    small = {path: re.sub("[^a-z0-9]", "", str(path.relative_to(folder)).lower())
             for path in _inner_folders(folder)}  # fmt: skip
    scales = {path: match[1] for path, name in small.items() if (match := LOW.fullmatch(name))}
    low = next((path for path in scales if scales[path] == str(scale)), None)
    read = {folder / name for name in HIGH} | {
        part for place in scales for part in (place, place.parent)
    }
    strays = [path for path in small if path not in read and UNREAD.fullmatch(small[path])]
    strays = [path for path in strays if list_images(path)]
    if strays:
        text = (
            f"{first_few(strays)}: small images are read from LR_bicubic/X{scale}, LRbicx{scale} "
            f"or LRBI/x{scale} beside HR or GT only"
        )
        refuse(text, {f"; move the large ones to {folder / HIGH[0]}": high == folder})
        log(f"{text}; " + (f"read: {low}" if low else "the large ones are shrunk"))
    return match_pairs(high, low, scale)


def _inner_folders(folder: Path) -> list[Path]:
    """Return the folders of two levels below a folder."""
    first = [folder / name for name in list_folders(folder)]
    return [*first, *(path / name for path in first for name in list_folders(path))]


def match_pairs(high: Path, low: Path | None, scale: int) -> list[Pair]:
    """Match the images of two folders by name; without the second one all are shrunk.

    Raises:
        ValueError: The first folder is empty, or names differ.
    """
    names = list_images(high)
    refuse(high, {"holds no images; put the high-resolution images there": not names})
    if low is None or not low.is_dir():
        return [Pair(high / name) for name in names]
    small = {Path(name).stem: low / name for name in list_images(low)}
    pairs, missing = [], []
    for name in names:
        stem = Path(name).stem
        names_tried = (name.format(stem, scale) for name in SMALL)
        all_pairs = next((small[path] for path in names_tried if path in small), None)
        if all_pairs is None:
            missing.append(f"{stem}x{scale}")
        pairs.append(Pair(high / name, all_pairs))
    surplus = small.keys() - {pair.low.stem for pair in pairs if pair.low is not None}
    remedy = f"give both the same images, or remove {low} to shrink the large ones"
    faults = {
        f"lacks images of {high} ({remedy})": missing,
        f"has images that {high} lacks ({remedy})": sorted(surplus),
    }
    refuse(low, faults)
    return pairs


def _number(pair: Pair) -> int:
    return int(pair.high.stem) if pair.high.stem.isdecimal() else 0
