"""Sample scenes: small generated datasets in the formats of COCO and ADE20K."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datamodules.dense.ade20k import ADE20KDataModule
from datamodules.dense.coco import CocoDataModule
from datamodules.sample.base import SampleDataModule
from datamodules.sample.scenes import BACKGROUND, write_ade20k, write_coco


class SampleDetection(SampleDataModule, CocoDataModule):
    """Scenes of several digits with boxes and masks, 10 classes in COCO's format.

    Args:
        root: Folder of all sample datasets; None means ``$MIXERLAB_CACHE`` or
            ``~/.cache/mixerlab``.
        num_train: Training scenes.
        num_val: Validation scenes.
        scene_size: Side of a scene in pixels.
        sample_seed: Seed of the generated data.
        options: Options of ``CocoDataModule``; defaults are ``scale=scene_size`` and ``flip=0``.
    """

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        num_train: int = 800,
        num_val: int = 100,
        scene_size: int = 160,
        sample_seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(None, **{"scale": scene_size, "flip": 0.0, "batch_size": 4, **options})
        self._describe(
            "detection", root, scene_size, {"train": num_train, "val": num_val}, sample_seed
        )

    def write(self, folder: Path) -> None:
        """Write JPEGs and one json per split."""
        write_coco(folder, self.counts, self.picture_size, self.sample_seed)


class SampleSegmentation(SampleDataModule, ADE20KDataModule):
    """The scenes of ``SampleDetection``, 11 classes (photo and digits) in ADE20K's layout.

    Args:
        root: Folder of all sample datasets; None means ``$MIXERLAB_CACHE`` or
            ``~/.cache/mixerlab``.
        num_train: Training scenes.
        num_val: Validation scenes.
        scene_size: Side of a scene in pixels.
        sample_seed: Seed of the generated data.
        options: Options of ``ADE20KDataModule``; by default ``scale`` and ``crop_size`` are
            ``scene_size`` and the augmentation is lighter.
    """

    background = BACKGROUND

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        num_train: int = 800,
        num_val: int = 100,
        scene_size: int = 160,
        sample_seed: int = 0,
        **options: Any,
    ) -> None:
        defaults = {
            "scale": scene_size,
            "crop_size": scene_size,
            "scale_jitter": (0.8, 1.25),
            # The photo fills most of every crop.
            "cat_max_ratio": 1.0,
            "flip": 0.0,
            "photometric": False,
        }
        super().__init__(None, **{**defaults, **options})
        self._describe(
            "segmentation", root, scene_size, {"train": num_train, "val": num_val}, sample_seed
        )

    def write(self, folder: Path) -> None:
        """Write JPEGs, masks and the list of classes."""
        write_ade20k(folder, self.counts, self.picture_size, self.sample_seed)
