"""How a run prepared the images that it was validated on, for tools that prepare their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from datamodules.classification import ClassificationDataModule
from datamodules.transforms import LightAugmentation, PaperAugmentation
from tasks.instantiate import build


@dataclass(frozen=True)
class Preprocessing:
    """A run's evaluation transform.

    Attributes:
        size: Side of the images that the network sees.
        crop_pct: Share of the resized image's side that is seen.
        squash: Resize both sides to the same length instead of keeping their ratio.
        interpolation: Of resizing.
        mean: Of the channels, for values from 0 to 1.
        std: Of the channels.
    """

    size: int
    crop_pct: float
    squash: bool
    interpolation: str
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def resized(self) -> int:
        """The side before the crop, rounded as timm rounds it."""
        return int(self.size / self.crop_pct)

    def of_timm(self) -> dict[str, Any]:
        """The preprocessing in the words of timm's configs."""
        return {
            "input_size": (3, self.size, self.size),
            "crop_pct": self.crop_pct,
            "crop_mode": "squash" if self.squash else "center",
            "interpolation": self.interpolation,
            "mean": self.mean,
            "std": self.std,
        }


def preprocessing_of(run: Mapping[str, Any] | None) -> Preprocessing | None:
    """What a classification run did to its images; None for other checkpoints.

    It is read off the run's own datamodule, so that defaults are those that it ran with. An
    augmentation from elsewhere, which may do anything, gives None as well.
    """
    if run is None or run.get("task_name") not in ("classification", "transfer"):
        return None
    datamodule = build(run, "data", seed=run["seed"], predict_path=None)
    assert isinstance(datamodule, ClassificationDataModule)
    made, size = datamodule.augmentation, datamodule.image_size
    if isinstance(made, PaperAugmentation):
        crop_pct, squash, interpolation = made.crop_pct, False, made.interpolation
    elif isinstance(made, LightAugmentation):
        crop_pct, squash, interpolation = 1.0, True, "bicubic"
    else:
        return None
    return Preprocessing(size, crop_pct, squash, interpolation, tuple(made.mean), tuple(made.std))
