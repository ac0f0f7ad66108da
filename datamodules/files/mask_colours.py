"""Masks with colours as labels, and the options to read them with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from datamodules.files.mask_pixels import Pixels

IGNORED = 255  # MMSegmentation's label of ignored pixels
UNKNOWN = 254  # marks colours without a label; the last label in 8 bits is therefore 253
STRAY = 20  # most colours beyond the classes that may be meant; more come from JPEG or smoothing

Labels = npt.NDArray[np.uint8]
Colour = tuple[int, ...]


@dataclass(frozen=True)
class ColourCode:
    """Meaning of the colours of a mask.

    Attributes:
        colours: RGB values per class, in label order.
        ignored: RGB values of pixels that are ignored.
        values: Value per class in the label maps that are written.
    """

    colours: tuple[Colour, ...]
    ignored: tuple[Colour, ...]
    values: tuple[int, ...]

    @cached_property
    def _lookup(self) -> Labels:
        """Label of each of the 2^24 colours, ``UNKNOWN`` for other colours."""
        lookup = np.full(1 << 24, UNKNOWN, np.uint8)
        labels = [*range(len(self.colours)), *[IGNORED] * len(self.ignored)]
        lookup[_packed(np.array([*self.colours, *self.ignored], np.uint8))] = labels
        return lookup

    def labels(self, pixels: Pixels, path: object) -> Labels:
        """Return the labels (H, W) of a mask's RGB values (H, W, 3).

        Raises:
            ValueError: A colour lacks a label, or the mask has more than 8 bits.
        """
        labels: Labels = np.empty(0, np.uint8)
        fault = ""
        if pixels.ndim != 3:
            fault = (
                f"grey values of {pixels.dtype}, but data.colors needs RGB with 8 bits per "
                "channel; save it so, or pass data.colors=null"
            )
        else:
            labels = self._lookup[_packed(pixels)]
            counts = count_colours([pixels[labels == UNKNOWN]])
            if counts:
                fault = (
                    f"{len(counts)} colour{'s' * (len(counts) > 1)} that data.colors and "
                    f"data.ignored_colors lack: {_format_colours(counts, 5)}"
                    f"{', ...' * (len(counts) > 5)}{_smoothing_hint(len(counts))}"
                )
        if fault:
            raise ValueError(f"mask {path} has {fault}")
        return labels


def count_colours(masks: Iterable[Pixels]) -> Counter[Colour]:
    """Count the pixels per colour of RGB values (..., 3)."""
    counts: Counter[Colour] = Counter()
    for pixels in masks:
        for colour, count in zip(*np.unique(_packed(pixels), return_counts=True), strict=True):
            value = int(colour)
            counts[value >> 16, value >> 8 & 255, value & 255] += int(count)
    return counts


def colour_message(mask: object, counts: Counter[Colour], num_classes: int, masks: int = 1) -> str:
    """Return the message for a mask in colours, with the options that read it.

    Args:
        mask: The file.
        counts: Pixels per colour.
        num_classes: Number of classes of the data.
        masks: Number of masks that were counted.
    """
    options = f"data.colors={_format_colours(counts, num_classes)}"
    surplus = len(counts) - num_classes
    if 0 < surplus <= STRAY:
        rest = Counter(dict(counts.most_common()[num_classes:]))
        options += f" data.ignored_colors={_format_colours(rest, surplus)}"
    count_text = (
        f"{len(counts):,} colour{'s' * (len(counts) > 1)} in {masks} mask{'s' * (masks > 1)}"
    )
    return (
        f"mask {mask} is in colours; pass {options} in the order of the {num_classes} classes "
        f"(here most frequent first, of {count_text}{_smoothing_hint(surplus)})"
    )


def _format_colours(counts: Counter[Colour], limit: int) -> str:
    colours = [colour for colour, _ in counts.most_common(limit)]
    return f"[{','.join(f'[{r},{g},{b}]' for r, g, b in colours)}]"


def _smoothing_hint(strays: int) -> str:
    """Return a hint on JPEG and smoothing if too many colours are left over."""
    if strays <= STRAY:
        return ""
    return "; so many colours come from JPEG or smoothed edges: save the masks without either"


def _packed(pixels: Pixels) -> npt.NDArray[np.uint32]:
    """Pack RGB values (..., 3) into one number per pixel."""
    red, green, blue = (pixels[..., channel].astype(np.uint32) for channel in range(3))
    return np.asarray(red << 16 | green << 8 | blue, np.uint32)
