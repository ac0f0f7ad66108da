"""Describe the preprocessing of a run's validation images for other tools."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backbones import Backbone
from datamodules.images.transforms import LightAugmentation, PaperAugmentation
from tasks.engine.family import ANY, find_family
from tasks.engine.instantiate import build
from tasks.engine.normalisation import Weights, expected_preprocessing

Size = tuple[int, int]
Values = dict[str, Any]


@dataclass(frozen=True)
class Preprocessing:
    """A run's evaluation transform.

    Attributes:
        size: Side of the network's input.
        crop_pct: Side of the crop relative to the resized image.
        squash: Resize both sides to the same length, ignoring the aspect ratio.
        interpolation: Interpolation for resizing.
        mean: Per channel, for values from 0 to 1; of bands in the units of their files.
        std: Per channel.
        bands: Numbers of the bands in a file; empty for RGB.
    """

    size: int
    crop_pct: float
    squash: bool
    interpolation: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    bands: tuple[int, ...] = ()

    @property
    def resized(self) -> int:
        """Return the side before the crop, rounded as in timm."""
        return int(self.size / self.crop_pct)

    def to_timm_config(self) -> dict[str, Any]:
        """Return the preprocessing in the format of timm's configs."""
        return {
            "input_size": (len(self.mean), self.size, self.size),
            "crop_pct": self.crop_pct,
            "crop_mode": "squash" if self.squash else "center",
            "interpolation": self.interpolation,
            "mean": self.mean,
            "std": self.std,
        }


def read_preprocessing(
    run: Mapping[str, Any] | None,
    backbone: Backbone | None = None,
    weights: Weights = None,
    size: int = 224,
) -> Preprocessing | None:
    """Return the preprocessing of a classifier's run, or what another file's weights expect.

    It is read from the run's own data module, so defaults are those of the run. Unknown
    augmentations, which may do anything, give None, and so do weights that nothing describes.

    Args:
        run: Config of the run that made the weights, or None.
        backbone: The exported one.
        weights: Its weights outside of run folders, opened or as a path.
        size: Side of its images.
    """
    if run is None and backbone is not None and weights is not None:
        usual, (values, _) = PaperAugmentation(), expected_preprocessing(backbone, weights)
        if not values:
            return None
        usual = dataclasses.replace(usual, **values)
        mean, std = tuple(usual.mean), tuple(usual.std)
        return Preprocessing(size, usual.crop_pct, False, usual.interpolation, mean, std)
    if run is None or find_family(run["task_name"]).export_of(ANY) != "classifier":
        return None
    datamodule = build(run["data"], "data", seed=run["seed"], predict_path=None)
    augmentation, size = datamodule.augmentation, datamodule.image_size
    if isinstance(augmentation, PaperAugmentation):
        crop_pct, squash, interpolation = augmentation.crop_pct, False, augmentation.interpolation
    elif isinstance(augmentation, LightAugmentation):
        crop_pct, squash, interpolation = 1.0, True, "bicubic"
    else:
        return None
    mean, std = datamodule.normalisation
    bands = getattr(datamodule, "bands", None)
    numbers = () if bands is None else bands.numbers
    return Preprocessing(size, crop_pct, squash, interpolation, tuple(mean), tuple(std), numbers)


# Sources of the values.
FROM_RUN = "the run's validation"
USUAL = "the papers' ImageNet recipe; the checkpoint does not record its own"
FROM_WEIGHTS = "what the weights expect, by their folder or timm"

# Of models that take images as they are.
UNCHANGED: Values = {
    "size": None, "resize": {"unchanged": True}, "crop": None, "interpolation": "bicubic",
    "upright": True, "channels": "RGB", "mean": [0.0] * 3, "std": [1.0] * 3, "source": FROM_RUN,
}  # fmt: skip


def describe_preprocessing(
    run: Mapping[str, Any] | None,
    backbone: Backbone,
    size: Size,
    *,
    has_fixed_size: bool,
    weights: Weights = None,
) -> Values:
    """Describe the preprocessing of images for an exported graph, as plain values.

    Args:
        run: Config of the run that made the weights, or None.
        backbone: The exported one.
        size: (H, W) at which the graph was recorded.
        has_fixed_size: The graph only takes images of this size.
        weights: Those outside of run folders, opened or as a path.

    Returns:
        ``mean`` and ``std`` per channel in the order ``channels``, for values from 0 to 1, or if
        ``channels`` lists the numbers of bands, in the units of their files;
        ``size``: the network's input (H, W), or None if it follows the image; ``resize``: the rule
        with its numbers; ``crop``: (H, W) of the centre crop, or None; ``interpolation`` of
        resizing; ``upright``: True if images are rotated by their EXIF data; ``source`` of these
        values.
    """
    prepared = read_preprocessing(run, backbone, weights, size[0])
    if run is not None and find_family(run["task_name"]).export_of(ANY) != "classifier":
        return _dense_preprocessing(run, backbone, size, has_fixed_size=has_fixed_size)
    source = FROM_RUN if run is not None else FROM_WEIGHTS if prepared else USUAL
    if prepared is not None and run is None and size[0] != size[1]:
        prepared = dataclasses.replace(prepared, squash=True)
    if prepared is None:
        source = USUAL
        usual = PaperAugmentation()
        square = size[0] == size[1]
        prepared = Preprocessing(
            size[0], usual.crop_pct, not square, usual.interpolation,
            tuple(usual.mean), tuple(usual.std),
        )  # fmt: skip
    sides = size if has_fixed_size or source != FROM_RUN else (prepared.size, prepared.size)
    cropped = not prepared.squash and sides[0] == sides[1]
    if cropped:
        resize = {"shorter_side": int(sides[0] / prepared.crop_pct)}
    else:
        resize = {"height": sides[0], "width": sides[1]}
    return {
        "size": list(sides), "resize": resize, "crop": list(sides) if cropped else None,
        "interpolation": prepared.interpolation, "upright": False,
        "channels": list(prepared.bands) or "RGB",
        "mean": list(prepared.mean), "std": list(prepared.std), "source": source,
    }  # fmt: skip


def _dense_preprocessing(
    run: Mapping[str, Any], backbone: Backbone, size: Size, *, has_fixed_size: bool
) -> Values:
    """Describe how a detector or segmentor preprocesses images before the backbone."""
    datamodule = build(run["data"], "data", seed=run["seed"], predict_path=None)
    weights = run["head"].get("class_weights")
    network = build(
        run["head"],
        "head",
        backbone=copy.deepcopy(backbone),
        num_classes=len(weights) if weights else 1,
    )
    processor, bands = network.model.data_preprocessor, getattr(datamodule, "bands", None)
    channels: Any = "RGB" if getattr(processor, "_channel_conversion", True) else "BGR"
    mean, std = (
        [round(float(value) / 255, 6) for value in getattr(processor, key).flatten()]
        for key in ("mean", "std")
    )
    if bands is not None:
        statistics, channels = datamodule.known_statistics(), list(bands.numbers)
        mean, std = list(statistics.mean), list(statistics.std)
    longest, shortest = max(datamodule.scale), min(datamodule.scale)
    if has_fixed_size:
        resize: dict[str, int] = {"height": size[0], "width": size[1]}
    else:
        resize = {"longest_side_at_most": longest, "shortest_side_at_most": shortest}
    return {
        "size": list(size) if has_fixed_size else None, "resize": resize, "crop": None,
        "interpolation": "bilinear", "upright": bands is None, "mean": mean, "std": std,
        "source": FROM_RUN, "channels": channels,
    }  # fmt: skip
