"""Masks of semantic segmentation: meaning of their values or colours, read strictly."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from datamodules.dense.toolkit_data import Results, Size
from datamodules.files.folders import first_few
from datamodules.files.headers import SWAPPED, read_header
from datamodules.files.mask_colours import (
    IGNORED,
    UNKNOWN,
    ColourCode,
    Labels,
    colour_message,
    count_colours,
)
from datamodules.files.mask_pixels import Pixels, is_grey, read_pixels
from datamodules.files.text_files import read_lines
from datamodules.files.values import refuse

NO_LABEL = -1
NAMES_RULE = f"1 to {IGNORED - 1} different class names"
LOOKED = 100  # masks of which colours are counted for a message


@dataclass(frozen=True)
class MaskCode:
    """Meaning of the values of a mask.

    Attributes:
        values: Value per class, in label order.
        ignored: Values of ignored pixels.
        meaning: The same as text, for messages.
    """

    values: tuple[int, ...]
    ignored: tuple[int, ...]
    meaning: str

    @cached_property
    def table(self) -> npt.NDArray[np.int16]:
        """Label of each value from 0 to 255; 255 if ignored, -1 if unknown."""
        table = np.full(256, NO_LABEL, np.int16)
        table[list(self.ignored)] = IGNORED
        table[list(self.values)] = np.arange(len(self.values))
        return table

    @cached_property
    def lookup(self) -> npt.NDArray[np.uint8]:
        """The table in 8 bits, with ``UNKNOWN`` for unknown values."""
        return np.where(self.table == NO_LABEL, UNKNOWN, self.table).astype(np.uint8)

    def labels(self, pixels: Pixels, path: object) -> Labels:
        """Return the labels (H, W) of a mask's pixels.

        Args:
            pixels: Pixels from ``read_pixels``; RGB values with equal channels count as grey.
            path: The mask, for messages.

        Raises:
            ValueError: A value lacks a label, or the mask is in colours.
        """
        import cv2

        if pixels.ndim == 3:
            check_grey(path, pixels, [pixels], len(self.values))
            pixels = pixels[..., 0]
        outside: npt.NDArray[np.bool_] = np.zeros((), np.bool_)
        small = pixels
        if pixels.dtype != np.uint8:
            outside = (pixels < 0) | (pixels > IGNORED)
            small = pixels.astype(np.uint8)
        labels = cv2.LUT(small, self.lookup)  # in a quarter of numpy's time
        unlabelled = (labels == UNKNOWN) | outside
        if unlabelled.any():
            values = first_few(np.unique(pixels[unlabelled]).tolist())
            raise ValueError(f"mask {path} has labels [{values}], but {self.meaning}")
        return np.asarray(labels, np.uint8)


Code = MaskCode | ColourCode


class StrictMask:
    """Step that reads and checks ``seg_map_path`` and turns values or colours into labels.

    A sound 8-bit mask gives the result of mmseg's LoadAnnotations. Any other raises an error that
    names the file.

    Args:
        code: Meaning of the values or colours.
    """

    def __init__(self, code: Code) -> None:
        self.code = code

    def __call__(self, results: Results) -> Results:
        """Add ``gt_seg_map`` (H, W), uint8."""
        path = results["seg_map_path"]
        pixels = self.pixels(path)
        check_mask_shape(path, pixels.shape[:2], results["ori_shape"], results["img_path"])
        results["gt_seg_map"] = self.code.labels(pixels, path)
        results["seg_fields"].append("gt_seg_map")
        return results

    def pixels(self, path: str | Path) -> Pixels:
        """Return a mask's pixels in the form that the code expects."""
        return read_pixels(path, colours=isinstance(self.code, ColourCode))


def check_meaning(masks: Sequence[Path], code: MaskCode, remedy: str) -> None:
    """Raise an error if the masks contradict the meaning of their layout.

    Args:
        masks: Masks of the dataset.
        code: Expected meaning of their values.
        remedy: Advice for two classes labelled 0 and 255; empty if the user chose the values.

    Raises:
        ValueError: The first mask is in colours, or two classes are labelled 0 and 255.
    """
    pixels = read_pixels(masks[0])
    if pixels.ndim == 3:
        rest = (read_pixels(mask, colours=True) for mask in _spread(masks[1:], LOOKED - 1))
        check_grey(masks[0], pixels, itertools.chain([pixels], rest), len(code.values))
    binary = len(code.values) == 2 and remedy
    rule = (
        f"has only 0 and 255, as all other masks, and 255 means ignored: one of the two classes "
        f"would be absent; {remedy}"
    )
    refuse(masks[0], {rule: binary and _are_black_and_white(_spread(masks, 10 * LOOKED))})


def check_grey(path: object, pixels: Pixels, masks: Iterable[Pixels], num_classes: int) -> None:
    """Raise an error with the options that read a mask in colours, unless its channels are equal.

    Args:
        path: The mask.
        pixels: Its RGB values (H, W, 3).
        masks: Masks of which colours are counted for the message.
        num_classes: Number of classes of the data.
    """
    if not is_grey(pixels):
        counts = [count_colours([mask]) for mask in masks]
        raise ValueError(colour_message(path, sum(counts, Counter()), num_classes, len(counts)))


def _are_black_and_white(masks: Iterable[Path]) -> bool:
    """Return True if masks have both 0 and 255, and only these."""
    ends_seen: set[int] = set()
    for mask in masks:
        pixels = read_pixels(mask)
        if pixels.ndim == 3 and not is_grey(pixels):
            return False
        ends = [int((pixels == end).sum()) for end in (0, IGNORED)]
        if sum(ends) < pixels.size:
            return False
        ends_seen.update(end for end, count in zip((0, IGNORED), ends, strict=True) if count)
    return ends_seen == {0, IGNORED}


def _spread(masks: Sequence[Path], limit: int) -> list[Path]:
    """Return at most ``limit`` masks, evenly spaced over a list."""
    return list(islice(masks, 0, None, max(1, -(-len(masks) // limit))))


def check_mask_shape(mask: object, shape: tuple[int, ...], image: Size, path: str) -> None:
    """Raise an error unless a mask has the height and width of its image.

    Args:
        mask: File of the mask.
        shape: Height and width of the mask.
        image: Height and width of the image, rotated by its EXIF data.
        path: File of the image.
    """
    if shape == image:
        return
    remedy = ""
    if shape == image[::-1] and read_header(path).orientation in SWAPPED:
        remedy = (
            ", rotated by its EXIF data: the mask fits the pixels as stored; remove the image's "
            "orientation (exiftool -Orientation= FILE) or rotate the mask"
        )
    raise ValueError(f"mask {mask} is {shape} (height, width), but its image is {image}{remedy}")


def consecutive_code(num_classes: int, *, first: int, ignored: Collection[int]) -> MaskCode:
    """Return the code of classes with consecutive labels.

    Args:
        num_classes: Number of classes.
        first: Label of the first class.
        ignored: Ignored labels; 255 is always ignored.
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
    """Return the names in a file, one per line.

    Raises:
        ValueError: The file is empty, or has too many names or duplicates.
    """
    names = [line for line in read_lines(file) if line]
    rule = f"must be {NAMES_RULE}, one per line; found {first_few(names)}"
    refuse(file, {rule: not are_names(names)})
    return tuple(names)


def are_names(names: Sequence[str]) -> bool:
    """Return True for names that are unique and few enough for 8-bit labels."""
    return 0 < len(names) < IGNORED and len(set(names)) == len(names)
