"""Masks of semantic segmentation: meaning of their values or colours, read strictly."""

from __future__ import annotations

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

NO_LABEL = -1
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
            if not is_grey(pixels):
                raise ValueError(colour_message(path, count_colours([pixels]), len(self.values)))
            pixels = pixels[..., 0]
        if pixels.dtype != np.uint8:
            pixels = self._narrowed(pixels, path)
        labels = cv2.LUT(pixels, self.lookup)  # in a quarter of numpy's time
        unknown = labels == UNKNOWN
        if unknown.any():
            self._reject(pixels[unknown], path)
        return np.asarray(labels, np.uint8)

    def _narrowed(self, pixels: Pixels, path: object) -> Pixels:
        outside = (pixels < 0) | (pixels > IGNORED)
        if outside.any():
            self._reject(pixels[outside], path)
        return pixels.astype(np.uint8)

    def _reject(self, values: Pixels, path: object) -> None:
        wrong = np.unique(values).tolist()
        raise ValueError(f"mask {path} has labels [{first_few(wrong)}], but {self.meaning}")


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
    if pixels.ndim == 3 and not is_grey(pixels):
        looked = [masks[0], *_spread(masks[1:], LOOKED - 1)]
        counts = count_colours(read_pixels(mask, colours=True) for mask in looked)
        raise ValueError(colour_message(masks[0], counts, len(code.values), len(looked)))
    if len(code.values) == 2 and remedy and _are_black_and_white(_spread(masks, 10 * LOOKED)):
        raise ValueError(
            f"the masks have only 0 and 255 (first: {masks[0]}), and 255 means ignored: one of the "
            f"two classes would be absent; {remedy}"
        )


def _are_black_and_white(masks: Iterable[Path]) -> bool:
    """Return True if masks have both 0 and 255, and only these."""
    found: set[int] = set()
    for mask in masks:
        pixels = read_pixels(mask)
        if pixels.ndim == 3 and not is_grey(pixels):
            return False
        ends = [int((pixels == end).sum()) for end in (0, IGNORED)]
        if sum(ends) < pixels.size:
            return False
        found.update(end for end, count in zip((0, IGNORED), ends, strict=True) if count)
    return found == {0, IGNORED}


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
    check_names(names, f"{file} must hold 1 to {IGNORED - 1} different class names, one per line")
    return tuple(names)


def check_names(names: Sequence[str], rule: str) -> None:
    """Raise an error unless names are unique and few enough for 8-bit labels."""
    if not names or len(names) > IGNORED - 1 or len(set(names)) < len(names):
        raise ValueError(f"{rule}; found {first_few(names)}")
