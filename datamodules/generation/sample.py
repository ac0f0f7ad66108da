"""Sample data: scikit-learn's digits at 32 pixels, in class folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from PIL import Image

from datamodules.files.cache import cache_root
from datamodules.generation.images import GenerationDataModule
from datamodules.sample.base import SampleDataModule
from datamodules.sample.digits import SampleSplit, load_material

SIDE = 32


class SampleGeneration(SampleDataModule, GenerationDataModule):
    """Grey digits of 32 pixels, white on black: 1,400 to train with and 397 to compare with.

    Args:
        root: Folder of all sample datasets; None means ``$MIXERLAB_CACHE`` or
            ``~/.cache/mixerlab``.
        options: Options of ``GenerationDataModule``.
    """

    def __init__(self, root: str | Path | None = None, **options: Any) -> None:
        defaults = {"image_size": SIDE, "channels": 1, "latent_channels": None, "factor": 1,
                    "flip": False, "batch_size": 64}  # fmt: skip
        super().__init__(None, **{**defaults, **options})
        self.base = Path(root).expanduser() if root is not None else cache_root()
        self.set_name = "generation-digits"

    def write(self, folder: Path) -> None:
        """Write PNGs into train/<digit> and val/<digit>."""
        for split in get_args(SampleSplit):
            material = load_material(split)
            for index, (digit, label) in enumerate(
                zip(material.digits, material.labels, strict=True)
            ):
                target = folder / split / str(label)
                target.mkdir(parents=True, exist_ok=True)
                image = Image.fromarray(digit).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
                image.save(target / f"{index:04d}.png")
