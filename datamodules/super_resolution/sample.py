"""Sample data: crops of the photographs that scikit-learn and scikit-image ship."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from skimage import data as photographs
from sklearn.datasets import load_sample_images

from datamodules.base import check_minimum
from datamodules.files.cache import cache_root
from datamodules.sample.base import SampleDataModule
from datamodules.sample.digits import PHOTO_COLUMNS
from datamodules.super_resolution.folders import ImageFolderSRDataModule

Pixels = NDArray[np.uint8]
SHARE, GAP = 0.66, 16  # columns of a photograph to train with, and those between both parts
CROP = 120  # side of the validation images, a multiple of 2, 3 and 4


class SampleSuperResolution(SampleDataModule, ImageFolderSRDataModule):
    """Eight photographs: their left parts are for training, their right parts for validation.

    Both pictures of a stereo pair are for training only, and so is the flower, whose right part is
    out of focus.

    Args:
        root: Folder of all sample datasets; None means ``$MIXERLAB_CACHE`` or
            ``~/.cache/mixerlab``.
        options: Options of ``ImageFolderSRDataModule``.
    """

    example = "data=div2k data.root=/data/DIV2K"

    def __init__(self, root: str | Path | None = None, **options: Any) -> None:
        super().__init__(None, **options)
        check_minimum("scale", self.scale, 2)
        self.base = Path(root).expanduser() if root is not None else cache_root()
        self.set_name = "super-resolution"

    def write(self, folder: Path) -> None:
        """Write PNGs into ``train`` and ``val``."""
        for split in ("train", "val"):
            (folder / split).mkdir()
        for name, (train, val) in parts().items():
            Image.fromarray(train).save(folder / "train" / f"{name}.png")
            for index, crop in enumerate(crops(val)):
                Image.fromarray(crop).save(folder / "val" / f"{name}_{index}.png")


def parts() -> dict[str, tuple[Pixels, Pixels]]:
    """Return the training and the validation part of each photograph, by name."""
    parts_of = {}
    china, flower = load_sample_images().images
    # The columns of all sample datasets, so that networks of other tasks share the split.
    parts_of["china"] = tuple(china[:, PHOTO_COLUMNS[split]] for split in ("train", "val"))
    parts_of["flower"] = flower[:, PHOTO_COLUMNS["train"]], flower[:0]
    for name in ("astronaut", "chelsea", "coffee", "rocket"):
        photo = getattr(photographs, name)()
        cut = round(SHARE * photo.shape[1])
        parts_of[name] = photo[:, :cut], photo[:, cut + GAP :]
    stereo = photographs.stereo_motorcycle()  # type: ignore[no-untyped-call]
    for name, photo in zip(("left", "right"), stereo[:2], strict=True):
        parts_of[f"motorcycle_{name}"] = photo, photo[:0]
    return {
        name: tuple(np.ascontiguousarray(part) for part in halves)  # type: ignore[misc]
        for name, halves in parts_of.items()
    }


def crops(photo: Pixels) -> list[Pixels]:
    """Return squares side by side, around the middle."""
    height, width = photo.shape[:2]
    return [
        photo[top : top + CROP, x_min : x_min + CROP]
        for top in range(height % CROP // 2, height - CROP + 1, CROP)
        for x_min in range(width % CROP // 2, width - CROP + 1, CROP)
    ]
