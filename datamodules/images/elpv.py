"""Solar cells of the ELPV data set, from its package or folder, validated by folds."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import numpy as np
from sklearn.model_selection import StratifiedKFold

from datamodules.files.text_files import finite_number, read_lines
from datamodules.files.values import check_option, file_errors, refuse
from datamodules.images.classification import ClassificationDataModule
from datamodules.images.transforms import Augmentation, LightAugmentation
from datamodules.loading.sampling import SeededDataset

LABELS = "labels.csv"
LEVELS = (0.0, 1 / 3, 2 / 3, 1.0)  # probabilities of a defect
CLASSES = {2: ("functional", "defective"), 4: ("0", "1/3", "2/3", "1")}


class ElpvDataModule(ClassificationDataModule):
    """2,624 electroluminescence images of solar cells, of which one fold validates.

    A cell is defective from a probability of 0.5 on, as its authors evaluate. The folds have equal
    shares of each probability and type of cell (mono- and polycrystalline), and are the same in
    every run.

    Layout: ``labels.csv`` with an image, a probability and a type per line, and the images.

    Source: Deitsch et al., "Automatic classification of defective photovoltaic module cells in
    electroluminescence images", Solar Energy 2019, https://arxiv.org/abs/1807.02894.

    Args:
        root: Folder of ``labels.csv``; None takes the installed package elpv-dataset.
        num_classes: 2, or 4 for the levels of the probability.
        folds: Number of folds.
        val_fold: The fold that validates, from 1 on.
        augmentation: Makes the transforms; None means small shifts and turns, and flips.
        **options: Options of ``ClassificationDataModule``.

    Raises:
        ValueError: The fold is unknown, or the package is missing.
    """

    kept_side = 300
    layout = f"{LABELS} with an image, a probability and a type per line, and the images"
    example = "data=elpv data.root=/data/elpv"

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        num_classes: Literal[2, 4] = 2,
        folds: int = 5,
        val_fold: int = 1,
        augmentation: Augmentation | None = None,
        **options: Any,
    ) -> None:
        super().__init__(root, augmentation=augmentation or LightAugmentation(flip=0.5), **options)
        check_option("num_classes", num_classes, num_classes in CLASSES, "2 or 4")
        check_option("folds", folds, folds >= 2, "at least 2")
        check_option("val_fold", val_fold, 1 <= val_fold <= folds, f"from 1 to {folds}")
        self.class_names, self.folds, self.val_fold = CLASSES[num_classes], folds, val_fold

    @property
    def folder(self) -> Path:
        """Folder of ``labels.csv``, that of the package by default."""
        if self.root is None:
            package = importlib.util.find_spec("elpv_dataset")
            if package is None or package.origin is None:
                raise ValueError(
                    'data=elpv needs the package elpv-dataset: type pip install "mixerlab[elpv]", '
                    f"or pass {self.example}"
                )
            self.root = Path(package.origin).parent / "data"
        return super().folder

    def build(self) -> dict[Any, SeededDataset]:
        """Read the labels and divide the images."""
        file = self.folder / LABELS
        if not file.is_file():
            raise FileNotFoundError(f"{self.folder} lacks {LABELS}; it needs {self.layout}")
        names, levels, types = [], [], []
        for number, line in enumerate(read_lines(file), start=1):
            with file_errors(f"{file}, line {number}"):
                name, probability, kind = line.split()
                levels.append(nearest_level(finite_number(probability)))
            names.append(name)
            types.append(kind)
        strata = [f"{level} {kind}" for level, kind in zip(levels, types, strict=True)]
        few = sorted(kind for kind, count in Counter(strata).items() if count < self.folds)
        refuse(file, {f"has fewer than data.folds={self.folds} images of a kind": few or not names})
        folds = StratifiedKFold(self.folds, shuffle=True, random_state=0)
        train, val = list(folds.split(names, strata))[self.val_fold - 1]
        labels = np.array(levels)
        if len(self.class_names) == 2:
            labels = (labels >= len(LEVELS) // 2).astype(np.int64)
        make = self.augmentation
        return {
            split: self.files(
                self.folder, [names[i] for i in rows], labels[rows].tolist(), transform
            )
            for split, rows, transform in (
                ("train", train, make.train(self.image_size)), ("val", val, self._eval)
            )
        }  # fmt: skip


def nearest_level(probability: float) -> int:
    """Return the place of a probability in ``LEVELS``.

    Raises:
        ValueError: It is none of them, to 0.01.
    """
    distances = [abs(probability - level) for level in LEVELS]
    if min(distances) > 0.01:
        raise ValueError(f"the probability must be 0, 1/3, 2/3 or 1, got {probability}")
    return distances.index(min(distances))
