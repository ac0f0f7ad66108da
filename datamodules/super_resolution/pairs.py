"""High-resolution images with their low-resolution ones: patches to train, whole images to test."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from datamodules.files.decoding import load_rgb
from datamodules.files.values import refuse
from datamodules.loading.sampling import Key, NamedDataset, Unreadable
from datamodules.super_resolution.imresize import crop_to_multiple, downscale

Pixels = NDArray[np.uint8]
REACH = 2  # low-resolution pixels that shrinking reaches beyond a patch


@dataclass(frozen=True)
class Pair:
    """Files of one image.

    Attributes:
        high: High-resolution image.
        low: Low-resolution image; None to shrink the other one.
    """

    high: Path
    low: Path | None = None


class Patches:
    """Random patches of images, flipped and turned.

    Args:
        pairs: The images.
        scale: Factor r.
        side: Side of the low-resolution patches.
        repeats: Patches per image.
        flip: Flip patches half of the time, and turn them by a multiple of 90 degrees.
        decoded: Folder of decoded images, see ``load_pixels``.
    """

    def __init__(
        self, pairs: Sequence[Pair], scale: int, side: int, repeats: int, flip: bool,
        decoded: Path | None = None,
    ) -> None:  # fmt: skip
        self.pairs, self.scale, self.side = tuple(pairs), scale, side
        self.repeats, self.flip, self.decoded = repeats, flip, decoded

    def __len__(self) -> int:
        return len(self.pairs) * self.repeats

    def path(self, index: int) -> str:
        """Return the file of a sample."""
        return str(self.pairs[index % len(self.pairs)].high)

    def __getitem__(self, index: int, /) -> dict[str, Tensor]:
        """Return ``low`` (3, p, p), ``high`` (3, r p, r p) and ``sample_id``."""
        pair, scale, side = self.pairs[index % len(self.pairs)], self.scale, self.side
        high = load_high(pair, scale, self.decoded)
        height, width = (length // scale for length in high.shape[:2])
        rule = (
            f"has {high.shape[1]}x{high.shape[0]} pixels, but a patch takes "
            f"{scale * side}x{scale * side}; lower data.patch_size, or remove the image"
        )
        refuse(pair.high, {rule: min(height, width) < side})
        top, x_min = (int(np.random.randint(length - side + 1)) for length in (height, width))
        if pair.low is None:
            low = shrunk_patch(high, scale, (top, x_min), side)
        else:
            low = load_low(pair.low, high, scale, self.decoded)[
                top : top + side, x_min : x_min + side
            ]
        high = high[scale * top : scale * (top + side), scale * x_min : scale * (x_min + side)]
        if self.flip:
            turns, flipped = int(np.random.randint(4)), bool(np.random.randint(2))
            low, high = (turn(image, turns, flipped) for image in (low, high))
        return make_sample(low, high, index)


class WholeImages:
    """Whole images to evaluate.

    Args:
        pairs: The images.
        scale: Factor r.
    """

    def __init__(self, pairs: Sequence[Pair], scale: int) -> None:
        self.pairs, self.scale = tuple(pairs), scale

    def __len__(self) -> int:
        return len(self.pairs)

    def path(self, index: int) -> str:
        """Return the file of a sample."""
        return str(self.pairs[index].high)

    def __getitem__(self, index: int, /) -> dict[str, Tensor]:
        """Return ``low`` (3, H, W), ``high`` (3, r H, r W) and ``sample_id``."""
        pair = self.pairs[index]
        high = load_high(pair, self.scale)
        if pair.low is None:
            low = downscale(high, self.scale)
        else:
            low = load_low(pair.low, high, self.scale)
        return make_sample(low, high, index)


def load_pixels(path: Path, decoded: Path | None = None) -> Pixels:
    """Read an image as RGB (H, W, 3).

    Args:
        path: The image.
        decoded: Folder that gets the decoded image once. It is then mapped into memory, so that a
            patch costs the reading of its own pixels.

    Raises:
        ValueError: The folder cannot be written.
    """
    if decoded is None:
        return np.asarray(load_rgb(path, upright=False))
    facts = path.stat()
    key = f"{path.resolve()} {facts.st_size} {facts.st_mtime_ns}"
    file = decoded / f"{hashlib.sha256(key.encode(errors='surrogateescape')).hexdigest()[:32]}.npy"
    if not file.is_file():
        pixels = np.asarray(load_rgb(path, upright=False))
        unfinished = file.with_suffix(f".{os.getpid()}")  # another worker may write the same image
        try:
            decoded.mkdir(parents=True, exist_ok=True)
            with unfinished.open("wb") as out:
                np.save(out, pixels)
            unfinished.replace(file)
        except OSError as error:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise ValueError(
                f"{file} cannot be written ({error}); free {pixels.nbytes / 1e6:.0f} MB per image "
                "or leave data.decoded out"
            ) from error
    mapped: Pixels = np.load(file, mmap_mode="r")
    return mapped


def load_high(pair: Pair, scale: int, decoded: Path | None = None) -> Pixels:
    """Read a high-resolution image, cropped at right and bottom to a multiple of the scale."""
    image = crop_to_multiple(load_pixels(pair.high, decoded), scale)
    refuse(pair.high, {f"has sides below data.scale={scale}; remove it": 0 in image.shape})
    return image


def load_low(path: Path, high: Pixels, scale: int, decoded: Path | None = None) -> Pixels:
    """Read a low-resolution image, whose sides must be those of the other one over the scale."""
    image = load_pixels(path, decoded)
    (height, width), (rows, columns) = image.shape[:2], high.shape[:2]
    check_low(path, (width, height), (columns // scale, rows // scale), scale)
    return image


def check_low(path: Path, size: tuple[int, int], sides: tuple[int, int], scale: int) -> None:
    """Raise an error for a low-resolution image of another width and height than it must have."""
    rule = (
        f"has {size[0]}x{size[1]} pixels, but data.scale={scale} takes {sides[0]}x{sides[1]}, the "
        "sides of its high-resolution image over the scale, rounded down; make it again or remove "
        "its folder, so that it is made from that image"
    )
    refuse(path, {rule: size != sides})


def shrunk_patch(high: Pixels, scale: int, place: tuple[int, int], side: int) -> Pixels:
    """Return the patch at a place of the shrunk image, without shrinking the whole image."""
    cuts = []
    for first, length in zip(place, high.shape[:2], strict=True):
        start, stop = max(0, first - REACH), min(length // scale, first + side + REACH)
        cuts.append((start, slice(scale * start, scale * stop)))
    (top, rows), (x_min, columns) = cuts
    low = downscale(high[rows, columns], scale)
    top, x_min = place[0] - top, place[1] - x_min
    return low[top : top + side, x_min : x_min + side]


def turn(image: Pixels, turns: int, flipped: bool) -> Pixels:
    """Turn an image by a multiple of 90 degrees, and flip it."""
    image = np.rot90(image, turns)
    return image[:, ::-1] if flipped else image


def to_tensor(image: Pixels) -> Tensor:
    """Convert an image (H, W, C) to a tensor (C, H, W)."""
    return torch.from_numpy(np.array(image.transpose(2, 0, 1), order="C"))


def make_sample(low: Pixels, high: Pixels, index: int) -> dict[str, Tensor]:
    """Return a sample with both images."""
    return {
        "low": to_tensor(low), "high": to_tensor(high), "sample_id": torch.tensor(index)
    }  # fmt: skip


class Middles(NamedDataset):
    """Samples cropped to their middle, so that a few large images to draw fit into memory.

    Args:
        dataset: Gives the samples.
        side: Most low-resolution rows and columns.
    """

    def __init__(self, dataset: NamedDataset, side: int) -> None:
        super().__init__(dataset.dataset, dataset.describe)
        self.samples, self.side = dataset, side

    def __getitem__(self, key: Key) -> Any:
        """Return ``low`` and, if known, ``high`` of a sample's middle."""
        sample = self.samples[key]
        return sample if isinstance(sample, Unreadable) else crop_middle(sample, self.side)


def crop_middle(sample: dict[str, Tensor], side: int) -> dict[str, Tensor]:
    """Crop the images of a sample to at most ``side`` low-resolution rows and columns."""
    low = sample["low"]
    cropped = {"low": low, "sample_id": sample["sample_id"]}
    for axis in (1, 2):
        length = low.shape[axis]
        length_kept = min(side, length)
        start = (length - length_kept) // 2
        cropped["low"] = cropped["low"].narrow(axis, start, length_kept)
        if "high" in sample:
            scale = sample["high"].shape[axis] // length
            high = cropped.get("high", sample["high"])
            cropped["high"] = high.narrow(axis, scale * start, scale * length_kept)
    return {key: value.clone() for key, value in cropped.items()}


def collate(samples: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
    """Return a batch; images of different sizes become a list."""
    batch: dict[str, Any] = {}
    for key in samples[0]:
        values = [sample[key] for sample in samples]
        is_equal = all(value.shape == values[0].shape for value in values)
        batch[key] = torch.stack(values) if is_equal else values
    return batch
