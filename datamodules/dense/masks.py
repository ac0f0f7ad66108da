"""Masks of semantic segmentation: what their values or colours mean, read strictly."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from datamodules.dense.toolkit_data import Results, Size
from datamodules.files import first_few
from datamodules.files.headers import TURNED, read_header
from datamodules.files.mask_colours import (
    IGNORED,
    REFUSED,
    ColourCode,
    Labels,
    count_colours,
    in_colours,
)
from datamodules.files.mask_pixels import Pixels, is_grey, read_pixels
from datamodules.files.text_files import read_lines

UNKNOWN = -1
LOOKED = 100  # masks whose colours are counted for a message


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

    def labels(self, pixels: Pixels, path: object) -> Labels:
        """The labels (H, W) of a mask's pixels.

        Args:
            pixels: From ``read_pixels``. RGB values whose channels are equal count as grey.
            path: The mask, for messages.

        Raises:
            ValueError: A value that has no meaning, or colours.
        """
        import cv2

        if pixels.ndim == 3:
            if not is_grey(pixels):
                raise ValueError(in_colours(path, count_colours([pixels]), len(self.values)))
            pixels = pixels[..., 0]
        if pixels.dtype != np.uint8:
            pixels = self._narrowed(pixels, path)
        labels = cv2.LUT(pixels, self.lookup)  # in a quarter of numpy's time
        refused = labels == REFUSED
        if refused.any():
            self._refuse(pixels[refused], path)
        return np.asarray(labels, np.uint8)

    def _narrowed(self, pixels: Pixels, path: object) -> Pixels:
        outside = (pixels < 0) | (pixels > IGNORED)
        if outside.any():
            self._refuse(pixels[outside], path)
        return pixels.astype(np.uint8)

    def _refuse(self, values: Pixels, path: object) -> None:
        wrong = np.unique(values).tolist()
        raise ValueError(f"mask {path} holds labels [{first_few(wrong)}], but {self.meaning}")


Code = MaskCode | ColourCode


class StrictMask:
    """Reads ``seg_map_path``, checks it and turns its values or colours into labels.

    Gives what mmseg's LoadAnnotations gives for a sound mask of 8 bits, else an error that names
    the file.

    Args:
        code: What the values or colours mean.
    """

    def __init__(self, code: Code) -> None:
        self.code = code

    def __call__(self, results: Results) -> Results:
        """Add ``gt_seg_map`` (H, W), uint8."""
        path = results["seg_map_path"]
        pixels = self.pixels(path)
        refuse_other_shape(path, pixels.shape[:2], results["ori_shape"], results["img_path"])
        results["gt_seg_map"] = self.code.labels(pixels, path)
        results["seg_fields"].append("gt_seg_map")
        return results

    def pixels(self, path: str | Path) -> Pixels:
        """A mask's pixels as the code takes them."""
        return read_pixels(path, colours=isinstance(self.code, ColourCode))


def refuse_misread(masks: Sequence[Path], code: MaskCode, remedy: str) -> None:
    """Raise an error where a set's masks mean something else than their layout says.

    Args:
        masks: Of the set.
        code: What their values are to mean.
        remedy: What to do about two classes labelled 0 and 255; empty if the values were chosen.

    Raises:
        ValueError: The first mask is in colours, or two classes are labelled 0 and 255.
    """
    pixels = read_pixels(masks[0])
    if pixels.ndim == 3 and not is_grey(pixels):
        looked = [masks[0], *_spread(masks[1:], LOOKED - 1)]
        counts = count_colours(read_pixels(mask, colours=True) for mask in looked)
        raise ValueError(in_colours(masks[0], counts, len(code.values), len(looked)))
    if len(code.values) == 2 and remedy and _are_black_and_white(_spread(masks, 10 * LOOKED)):
        raise ValueError(
            f"the masks hold only 0 and 255 (first: {masks[0]}), and 255 means ignored: one of the "
            f"two classes would be absent; {remedy}"
        )


def _are_black_and_white(masks: Iterable[Path]) -> bool:
    """Return True if masks hold both 0 and 255, and nothing else."""
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
    """At most so many masks from all over a list."""
    return list(islice(masks, 0, None, max(1, -(-len(masks) // limit))))


def refuse_other_shape(mask: object, shape: tuple[int, ...], image: Size, path: str) -> None:
    """Raise an error unless a mask has the height and width of its image.

    Args:
        mask: Its file.
        shape: Its height and width.
        image: Height and width of the image, turned as its EXIF data say.
        path: File of the image.
    """
    if shape == image:
        return
    remedy = ""
    if shape == image[::-1] and read_header(path).orientation in TURNED:
        remedy = (
            ", turned by its EXIF data: the mask fits the pixels as stored; remove the image's "
            "orientation (exiftool -Orientation= FILE) or turn the mask"
        )
    raise ValueError(f"mask {mask} is {shape} (height, width), but its image is {image}{remedy}")


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
    names = [line for line in read_lines(file) if line]
    refuse_bad_names(
        names, f"{file} must hold 1 to {IGNORED - 1} different class names, one a line"
    )
    return tuple(names)


def refuse_bad_names(names: Sequence[str], rule: str) -> None:
    """Raise an error unless names are different, and no more than labels fit into 8 bits."""
    if not names or len(names) > IGNORED - 1 or len(set(names)) < len(names):
        raise ValueError(f"{rule}; found {first_few(names)}")
