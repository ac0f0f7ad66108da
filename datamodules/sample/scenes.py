"""Scenes of several digits on a photograph, written as a COCO or an ADE20K folder.

Axes: N instances, H W pixels.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from datamodules.sample.outline_shapes import bounding_box, encode_mask

Mask = NDArray[np.bool_]

DIGIT_NAMES = tuple("0123456789")
BACKGROUND = "photo"
SPLIT_IDS: dict[SampleSplit, int] = {"train": 0, "val": 1}
MIN_DIGIT_HEIGHT = 20
MAX_DIGIT_SHARE = 0.4  # of the scene's side
DIGITS_PER_SCENE = (4, 9)  # from, to below; dense scenes teach more per second of training
MAX_OVERLAP = 0.1  # of the smaller of two boxes
JPEG: dict[str, Any] = {"quality": 92, "subsampling": 0}


@dataclass(frozen=True)
class Scene:
    """An image with its ground truth.

    Attributes:
        image: RGB.
        masks: (N, H, W) visible pixels per digit, disjoint.
        labels: N digits.
    """

    image: Image.Image
    masks: NDArray[np.bool_]
    labels: tuple[int, ...]


def generate_scenes(split: SampleSplit, count: int, size: int, seed: int) -> Iterator[Scene]:
    """Yield the first ``count`` scenes of a split; each depends on seed, split and index alone."""
    source = load_material(split)
    for index in range(count):
        yield make_scene(np.random.default_rng([seed, SPLIT_IDS[split], index]), source, size)


def make_scene(rng: np.random.Generator, source: Material, size: int) -> Scene:
    """Place four to eight digits of various sizes on a photograph with little overlap."""
    canvas = photo_crop(rng, source.photos, size)
    masks: list[Mask] = []
    labels: list[int] = []
    for _ in range(rng.integers(*DIGITS_PER_SCENE)):
        choice = rng.integers(len(source.digits))
        tallest = max(MAX_DIGIT_SHARE * size, MIN_DIGIT_HEIGHT)
        height = round(float(np.exp(rng.uniform(np.log(MIN_DIGIT_HEIGHT), np.log(tallest)))))
        alpha = digit_alpha(rng, source.digits[choice], height)
        place = find_free_place(rng, alpha.shape, masks, size)
        if place is None:
            continue
        top, x_min = place
        window = (slice(top, top + alpha.shape[0]), slice(x_min, x_min + alpha.shape[1]))
        paste(canvas, alpha, top, x_min, contrasting_colour(rng, canvas[window]))
        mask = np.zeros((size, size), dtype=bool)
        mask[window] = alpha > 0.5
        for covered in masks:
            covered &= ~mask
        masks.append(mask)
        labels.append(int(source.labels[choice]))
    return Scene(to_image(canvas), np.stack(masks), tuple(labels))


def find_free_place(
    rng: np.random.Generator, shape: tuple[int, ...], masks: list[Mask], size: int
) -> tuple[int, int] | None:
    """Return a (top, left) where a (height, width) box hardly overlaps earlier digits, or None."""
    height, width = shape
    if height >= size or width >= size:
        return None
    boxes = [bounding_box(mask) for mask in masks]
    for _ in range(30):
        top, x_min = int(rng.integers(size - height)), int(rng.integers(size - width))
        if all(_overlap((x_min, top, width, height), box) <= MAX_OVERLAP for box in boxes):
            return top, x_min
    return None


def _overlap(first: tuple[int, ...], second: tuple[int, ...]) -> float:
    """Return the common area over the smaller area of two (x, y, width, height) boxes."""
    sides = [
        max(min(first[i] + first[i + 2], second[i] + second[i + 2]) - max(first[i], second[i]), 0)
        for i in (0, 1)
    ]
    return sides[0] * sides[1] / min(first[2] * first[3], second[2] * second[3])


def write_coco(folder: Path, counts: dict[SampleSplit, int], size: int, seed: int) -> None:
    """Write the scenes as COCO 2017: one json and one folder of JPEGs per split."""
    (folder / "annotations").mkdir()
    categories = [
        {"id": digit + 1, "name": name, "supercategory": "digit"}
        for digit, name in enumerate(DIGIT_NAMES)
    ]
    for split, count in counts.items():
        (folder / f"{split}2017").mkdir()
        images: list[dict[str, Any]] = []
        annotations: list[dict[str, Any]] = []
        for image_id, scene in enumerate(generate_scenes(split, count, size, seed), start=1):
            name = f"{image_id:012d}.jpg"
            scene.image.save(folder / f"{split}2017" / name, **JPEG)
            images.append({"id": image_id, "file_name": name, "height": size, "width": size})
            for mask, label in zip(scene.masks, scene.labels, strict=True):
                annotations.append(
                    {
                        "id": len(annotations) + 1,
                        "image_id": image_id,
                        "category_id": label + 1,
                        "bbox": list(bounding_box(mask)),
                        "area": int(mask.sum()),
                        "iscrowd": 0,
                        "segmentation": encode_mask(mask),
                    }
                )
        content = {
            "info": {"description": f"sample scenes, {split}"},
            "licenses": [],
            "images": images,
            "annotations": annotations,
            "categories": categories,
        }
        (folder / "annotations" / f"instances_{split}2017.json").write_text(json.dumps(content))


def write_ade20k(folder: Path, counts: dict[SampleSplit, int], size: int, seed: int) -> None:
    """Write the scenes as ADE20K's scene parsing set: JPEGs, masks and the list of classes."""
    for split, count in counts.items():
        split_folder = {"train": "training", "val": "validation"}[split]
        for kind in ("images", "annotations"):
            (folder / kind / split_folder).mkdir(parents=True)
        for index, scene in enumerate(generate_scenes(split, count, size, seed), start=1):
            name = f"ADE_{split}_{index:08d}"
            scene.image.save(folder / "images" / split_folder / f"{name}.jpg", **JPEG)
            Image.fromarray(semantic_mask(scene)).save(
                folder / "annotations" / split_folder / f"{name}.png"
            )
    (folder / "class_names.txt").write_text("\n".join((BACKGROUND, *DIGIT_NAMES)) + "\n")


def semantic_mask(scene: Scene) -> NDArray[np.uint8]:
    """Return labels (H, W): 0 for a rim of one pixel around digits, 1 for photo, 2 + digit."""
    labels = np.ones(scene.masks.shape[1:], dtype=np.uint8)
    inked = scene.masks.any(axis=0)
    padded = np.pad(inked, 1)
    height, width = inked.shape
    near = np.zeros_like(inked)
    for dy in range(3):
        for dx in range(3):
            near |= padded[dy : dy + height, dx : dx + width]
    labels[near & ~inked] = 0
    for mask, digit in zip(scene.masks, scene.labels, strict=True):
        labels[mask] = digit + 2
    return labels
