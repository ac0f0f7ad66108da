"""Masks whose colours are the labels, and what to type where they are found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from datamodules.files.mask_pixels import Pixels

IGNORED = 255  # MMSegmentation's label of pixels that do not count
REFUSED = 254  # an unknown value in 8 bits: the last label there can be is 253
STRAY = 20  # further colours than classes that may be meant; more are of JPEG or smoothed edges

Labels = npt.NDArray[np.uint8]
Colour = tuple[int, ...]


@dataclass(frozen=True)
class ColourCode:
    """What the colours of a mask mean.

    Attributes:
        colours: RGB values of each class, in label order.
        ignored: Of pixels that do not count.
        values: What label maps that are written hold for each class.
    """

    colours: tuple[Colour, ...]
    ignored: tuple[Colour, ...]
    values: tuple[int, ...]

    @cached_property
    def _lookup(self) -> Labels:
        """The label of each of the 2^24 colours, ``REFUSED`` where it is unknown."""
        lookup = np.full(1 << 24, REFUSED, np.uint8)
        labels = [*range(len(self.colours)), *[IGNORED] * len(self.ignored)]
        lookup[_packed(np.array([*self.colours, *self.ignored], np.uint8))] = labels
        return lookup

    def labels(self, pixels: Pixels, path: object) -> Labels:
        """The labels (H, W) of a mask's RGB values (H, W, 3).

        Raises:
            ValueError: A colour that has no meaning, or more than 8 bits.
        """
        if pixels.ndim != 3:
            raise ValueError(
                f"mask {path} has grey values of {pixels.dtype}, but data.colors reads colours of "
                "8 bits per channel; save it as such, or pass data.colors=null"
            )
        labels = self._lookup[_packed(pixels)]
        refused = labels == REFUSED
        if refused.any():
            counts = count_colours([pixels[refused]])
            raise ValueError(
                f"mask {path} holds {len(counts)} colour{'s' * (len(counts) > 1)} that "
                f"data.colors and data.ignored_colors lack: {_listed(counts, 5)}"
                f"{', ...' * (len(counts) > 5)}{_of_smoothing(len(counts))}"
            )
        return labels


def count_colours(masks: Iterable[Pixels]) -> Counter[Colour]:
    """How many pixels have each colour, of RGB values (..., 3)."""
    counts: Counter[Colour] = Counter()
    for pixels in masks:
        for colour, count in zip(*np.unique(_packed(pixels), return_counts=True), strict=True):
            value = int(colour)
            counts[value >> 16, value >> 8 & 255, value & 255] += int(count)
    return counts


def in_colours(mask: object, counts: Counter[Colour], num_classes: int, masks: int = 1) -> str:
    """The message for a mask in colours, with the options that read it.

    Args:
        mask: The file.
        counts: Of the colours found.
        num_classes: Of the data.
        masks: How many were counted.
    """
    options = f"data.colors={_listed(counts, num_classes)}"
    others = len(counts) - num_classes
    if 0 < others <= STRAY:
        rest = Counter(dict(counts.most_common()[num_classes:]))
        options += f" data.ignored_colors={_listed(rest, others)}"
    found = f"{len(counts):,} colour{'s' * (len(counts) > 1)} in {masks} mask{'s' * (masks > 1)}"
    return (
        f"mask {mask} is in colours; pass {options} in the order of the {num_classes} classes "
        f"(here most frequent first, of {found}{_of_smoothing(others)})"
    )


def _listed(counts: Counter[Colour], limit: int) -> str:
    colours = [colour for colour, _ in counts.most_common(limit)]
    return f"[{','.join(f'[{r},{g},{b}]' for r, g, b in colours)}]"


def _of_smoothing(strays: int) -> str:
    """Say what makes so many colours, if too many are left over."""
    if strays <= STRAY:
        return ""
    return "; so many come of JPEG or smoothed edges: save the masks without either"


def _packed(pixels: Pixels) -> npt.NDArray[np.uint32]:
    """RGB values (..., 3) as one number each."""
    red, green, blue = (pixels[..., channel].astype(np.uint32) for channel in range(3))
    return np.asarray(red << 16 | green << 8 | blue, np.uint32)
