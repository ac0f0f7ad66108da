"""Images of one digit in class folders, and of two in CIFAR-100's format or with a csv file."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from datamodules.sample.digits import (
    Material,
    SampleSplit,
    contrasting_colour,
    digit_alpha,
    load_material,
    paste,
    photo_crop,
    to_image,
)
from datamodules.sample.scenes import DIGIT_NAMES, JPEG, SPLIT_IDS

TABLE = "labels.csv"
PAIR_SIDE = 32  # as in CIFAR
PAIR_NAMES = tuple(f"{number:02d}" for number in range(100))
# For networks that train for minutes from random weights: darker photographs and nearly upright
# digits halve the steps that DeiT-T needs.
DIMMED = 0.5
POSE = {"max_angle": 5.0, "max_stretch": 0.05}


def write_image_folder(
    folder: Path, copies: dict[SampleSplit, int], size: int, seed: int, limit: int
) -> None:
    """Write class folders of JPEGs with one digit each.

    Args:
        folder: Folder that receives ``train`` and ``val``.
        copies: Images per digit, on different photo crops.
        size: Side of an image in pixels.
        seed: Seed of the images.
        limit: Most digits to use per class.
    """
    for split, times in copies.items():
        source = load_material(split)
        for label, name in enumerate(DIGIT_NAMES):
            target = folder / split / name
            target.mkdir(parents=True)
            for index in np.flatnonzero(source.labels == label)[:limit].tolist():
                for copy in range(times):
                    rng = np.random.default_rng([seed, SPLIT_IDS[split], index, copy])
                    picture = one_digit(rng, source, index, size)
                    picture.save(target / f"{index:04d}_{copy}.jpg", **JPEG)


def one_digit(rng: np.random.Generator, source: Material, index: int, size: int) -> Image.Image:
    """Draw a digit of 86 to 92 % of the image's height near the middle of a photo crop."""
    canvas = DIMMED * photo_crop(rng, source.photos, size)
    alpha = digit_alpha(rng, source.digits[index], round(size * rng.uniform(0.86, 0.92)), **POSE)
    alpha = alpha[:, :size]
    height, width = alpha.shape
    top = int(rng.integers(size - height + 1))
    room = size - width
    x_min = int(np.clip(room / 2 + rng.uniform(-0.03, 0.03) * size, 0, room))
    colour = contrasting_colour(rng, canvas[top : top + height, x_min : x_min + width])
    paste(canvas, alpha, top, x_min, colour)
    return to_image(canvas)


def write_cifar100(folder: Path, per_class: dict[SampleSplit, int], seed: int) -> None:
    """Write the files ``train``, ``test`` and ``meta`` with images of two-digit numbers.

    Args:
        folder: Folder that receives ``cifar-100-python``.
        per_class: Images per number.
        seed: Seed of the images.
    """
    target = folder / "cifar-100-python"
    target.mkdir()
    for split, count in per_class.items():
        source = load_material(split)
        order = np.random.default_rng([seed, SPLIT_IDS[split]]).permutation(100 * count)
        numbers = np.repeat(np.arange(100), count)[order]
        rows = [
            two_digits(
                np.random.default_rng([seed, SPLIT_IDS[split], row, number]), source, int(number)
            )
            for row, number in enumerate(numbers)
        ]
        name = {"train": "train", "val": "test"}[split]
        content = {
            b"filenames": [
                f"{PAIR_NAMES[number]}_{row:05d}.png".encode() for row, number in enumerate(numbers)
            ],
            b"batch_label": f"sample data, {name}".encode(),
            b"fine_labels": [int(number) for number in numbers],
            b"coarse_labels": [int(number) // 5 for number in numbers],
            b"data": np.stack(rows),
        }
        dump(target / name, content)
    coarse = [
        f"{PAIR_NAMES[first]} to {PAIR_NAMES[first + 4]}".encode() for first in range(0, 100, 5)
    ]
    dump(
        target / "meta",
        {b"fine_label_names": [n.encode() for n in PAIR_NAMES], b"coarse_label_names": coarse},
    )


def write_label_table(folder: Path, counts: dict[SampleSplit, int], seed: int) -> None:
    """Write images of two digits, and a csv file of the digits in each.

    Args:
        folder: Folder that receives ``images`` and ``labels.csv``.
        counts: Images per split.
        seed: Seed of the images.
    """
    (folder / "images").mkdir()
    lines = ["image,labels,split"]
    for split, count in counts.items():
        source = load_material(split)
        for row in range(count):
            rng = np.random.default_rng([seed, SPLIT_IDS[split], row])
            number = int(rng.integers(100))
            pixels = two_digits(rng, source, number).reshape(3, PAIR_SIDE, PAIR_SIDE)
            name = f"images/{split}_{row:05d}.png"
            Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0))).save(folder / name)
            lines.append(f"{name},{';'.join(sorted({*PAIR_NAMES[number]}))},{split}")
    (folder / TABLE).write_text("\n".join(lines) + "\n")


def dump(path: Path, content: Mapping[bytes, object]) -> None:
    """Write a pickle of the protocol of CIFAR's files."""
    path.write_bytes(pickle.dumps(content, protocol=2))


def two_digits(rng: np.random.Generator, source: Material, number: int) -> NDArray[np.uint8]:
    """Draw a number from 0 to 99 as two digits side by side on a photo crop.

    Returns:
        (3072,) pixels, channel by channel.
    """
    canvas = DIMMED * photo_crop(rng, source.photos, PAIR_SIDE)
    height = int(rng.integers(22, 29))
    half = PAIR_SIDE // 2
    colour = contrasting_colour(rng, canvas)
    for place, digit in enumerate(divmod(number, 10)):
        choice = rng.choice(np.flatnonzero(source.labels == digit))
        alpha = digit_alpha(rng, source.digits[choice], height, **POSE)
        if alpha.shape[1] > half - 1:
            thin = Image.fromarray(alpha).resize((half - 1, height), Image.Resampling.BILINEAR)
            alpha = np.asarray(thin)
        top = int(rng.integers(PAIR_SIDE - height + 1))
        x_min = place * half + int(rng.integers(half - alpha.shape[1] + 1))
        paste(canvas, alpha, top, x_min, colour)
    pixels = np.asarray(to_image(canvas))
    return np.ascontiguousarray(pixels.transpose(2, 0, 1)).reshape(-1)
