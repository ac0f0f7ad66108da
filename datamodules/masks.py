"""Masks of semantic segmentation: what their values mean, and how one is read strictly."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from datamodules.dense import Results, Size
from datamodules.files import decode, first_few

IGNORED = 255  # MMSegmentation's label of pixels that do not count
UNKNOWN = -1
REFUSED = 254  # an unknown value in 8 bits: the last label there can be is 253


@dataclass(frozen=True)
class MaskCode:
    """What the values of a mask mean.

    Attributes:
        values: Of each class, in label order.
        ignored: Of pixels that do not count.
        meaning: The same in words, for messages.
    """

    values: tuple[int, ...]
    ignored: tuple[int, ...]
    meaning: str

    @cached_property
    def table(self) -> npt.NDArray[np.int16]:
        """Label of each value from 0 to 255, 255 where it is ignored and -1 where it is unknown."""
        table = np.full(256, UNKNOWN, np.int16)
        table[list(self.ignored)] = IGNORED
        table[list(self.values)] = np.arange(len(self.values))
        return table

    @cached_property
    def lookup(self) -> npt.NDArray[np.uint8]:
        """The table in 8 bits, with ``REFUSED`` where it is unknown."""
        return np.where(self.table == UNKNOWN, REFUSED, self.table).astype(np.uint8)


class StrictMask:
    """Reads ``seg_map_path``, checks it and turns its values into labels.

    Gives what mmseg's LoadAnnotations gives for a sound mask, else an error that names the file.

    Args:
        code: What the values mean.
    """

    def __init__(self, code: MaskCode) -> None:
        self.code = code

    def __call__(self, results: Results) -> Results:
        """Add ``gt_seg_map`` (H, W), uint8."""
        import cv2

        path = results["seg_map_path"]
        image = decode(path)
        if image.mode not in ("L", "P"):
            raise ValueError(
                f"mask {path} has pixels of mode {image.mode}; "
                "save labels as an 8-bit grey or palette PNG"
            )
        refuse_other_shape(path, (image.height, image.width), results["ori_shape"])
        values = np.asarray(image)
        labels = cv2.LUT(values, self.code.lookup)  # in a quarter of numpy's time
        refused = labels == REFUSED
        if refused.any():
            wrong = np.unique(values[refused]).tolist()
            raise ValueError(
                f"mask {path} holds labels [{first_few(wrong)}], but {self.code.meaning}"
            )
        results["gt_seg_map"] = labels
        results["seg_fields"].append("gt_seg_map")
        return results


def refuse_other_shape(mask: object, shape: tuple[int, ...], image: Size) -> None:
    """Raise an error unless a mask has the height and width of its image."""
    if shape != image:
        raise ValueError(f"mask {mask} is {shape} (height, width), but its image is {image}")


def consecutive(num_classes: int, *, first: int, ignored: Collection[int]) -> MaskCode:
    """Classes that are labelled one after the other.

    Args:
        num_classes: How many there are.
        first: Label of the first one.
        ignored: Labels that do not count; 255 never does.
    """
    last = first + num_classes - 1
    ignored = {*ignored, IGNORED}
    zero = ", and 0 means ignored (reduce_zero_label)" if first == 1 and 0 in ignored else ""
    also = sorted(ignored - {0, IGNORED}) if zero else sorted(ignored - {IGNORED})
    more = f"; {', '.join(map(str, also))} are ignored" if also else ""
    return MaskCode(
        tuple(range(first, last + 1)),
        tuple(sorted(ignored)),
        f"{num_classes} classes are labelled {first} to {last}{zero}{more}",
    )


def read_class_names(file: Path) -> tuple[str, ...]:
    """The names in a file, one a line.

    Raises:
        ValueError: There are none, too many, or one twice.
    """
    names = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    refuse_bad_names(
        names, f"{file} must hold 1 to {IGNORED - 1} different class names, one a line"
    )
    return tuple(names)


def refuse_bad_names(names: Sequence[str], rule: str) -> None:
    """Raise an error unless names are different, and no more than labels fit into 8 bits."""
    if not names or len(names) > IGNORED - 1 or len(set(names)) < len(names):
        raise ValueError(f"{rule}; found {first_few(names)}")
