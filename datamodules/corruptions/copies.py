"""Corrupted copies of class folders, in ImageNet-C's layout."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image
from torchvision import transforms

from datamodules.corruptions import KINDS, corrupt
from datamodules.corruptions.weather import Photographs
from datamodules.files.class_listing import list_class_images
from datamodules.files.decoding import load_rgb
from datamodules.files.folders import find_images, list_folders, validation_folder
from datamodules.files.resizing import BoundedResize
from datamodules.files.text_files import read_json
from datamodules.files.values import refuse
from datamodules.loading.memory import check_shared_memory
from datamodules.loading.workers import end_with_parent

NOTE = "corrupted.json"  # in the copy's folder: its options
LONGEST_NAME = 255  # bytes of a file name
JPEG = {"quality": 85, "optimize": True}  # as in the published files


@dataclass(frozen=True)
class CopyOptions:
    """Options of a corrupted copy.

    Attributes:
        kinds: Corruptions, of ``KINDS``.
        severities: Severities from 1 to 5.
        size: Side of the copies in pixels.
        resize: Shorter side of the images before the central crop of ``size``.
        seed: Seed; random numbers depend on it, the image's name, the kind and the severity.
        frost: Folder of photographs of frost; None generates textures.
    """

    kinds: tuple[str, ...] = KINDS
    severities: tuple[int, ...] = (1, 2, 3, 4, 5)
    size: int = 224
    resize: int = 256
    seed: int = 0
    frost: str | None = None


def write_copy(
    root: Path,
    out: Path,
    how: CopyOptions,
    workers: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Write ``out/<kind>/<severity>/<class>/<image>``; existing files are kept.

    Args:
        root: Folder with class folders, or with ``val`` (``valid``, ``validation``) that has them.
        out: New folder, or one that the same call has begun.
        how: Options of the copy.
        workers: Number of processes.
        progress: Called with the number of finished images and the total.

    Returns:
        Number of images, each in all kinds and severities.

    Raises:
        ValueError: Class folders are missing, an image is broken, or ``out`` has another copy.
    """
    inner = validation_folder(root)
    folder = inner if inner.is_dir() else root
    images_of = list_class_images(folder, list_folders(folder)) if folder.is_dir() else {}
    names = [name for images in images_of.values() for name in images]
    rule = f"is copied with resize={how.resize}, which must be at least the crop's side size="
    faults = {
        f"{rule}{how.size}": how.resize < how.size,
        "is not a folder that holds class folders with images: <class>/*.jpg": not names,
        "has images that differ only in their endings; rename them": (
            len({copy_name(name) for name in names}) < len(names)
        ),
        f"holds out={out}; pass a folder beside it": (
            out.resolve().is_relative_to(folder.resolve())
        ),
    }
    refuse(folder, faults)
    _begin(out, how, folder)
    frost = load_frost(Path(how.frost), how.size) if how.frost else ()
    work = partial(write_image, folder, out, how, frost)
    if workers == 1:
        for count, _ in enumerate(map(work, names), start=1):
            _report(progress, count, len(names))
        return len(names)
    # Forked: a fresh process imports for longer than many images take.
    check_shared_memory("workers=1")
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(workers, context, end_with_parent) as pool:
        for count, _ in enumerate(pool.map(work, names), start=1):
            _report(progress, count, len(names))
    return len(names)


def write_image(folder: Path, out: Path, how: CopyOptions, frost: Photographs, name: str) -> None:
    """Write the missing corruptions of one image."""
    missing = {
        (kind, severity): target
        for kind in how.kinds
        for severity in how.severities
        if not (target := out / kind / str(severity) / copy_name(name)).exists()
    }
    if not missing:
        return
    crop = transforms.CenterCrop(how.size)
    resize = BoundedResize(how.resize, crop.size, transforms.InterpolationMode.BILINEAR)
    prepare = transforms.Compose([resize, crop])
    image: Image.Image = prepare(load_rgb(folder / name, upright=False))
    for (kind, severity), target in missing.items():
        corrupted = corrupt(image, kind, severity, generator(how.seed, name, kind, severity), frost)
        target.parent.mkdir(parents=True, exist_ok=True)
        begun = target.with_name(f".{os.getpid()}.part")  # image names may use all 255 bytes
        try:
            corrupted.save(begun, "JPEG", **JPEG)
            begun.replace(target)
        except OSError as error:
            begun.unlink(missing_ok=True)
            raise OSError(f"{target} cannot be written ({error.strerror or error})") from error


def generator(seed: int, name: str, kind: str, severity: int) -> np.random.Generator:
    """Return the random generator of one corrupted image."""
    digest = hashlib.sha256(os.fsencode(name)).digest()[:8]
    key = [seed, int.from_bytes(digest, "big"), KINDS.index(kind), severity]
    return np.random.default_rng(key)


def copy_name(name: str) -> str:
    """Return the name of an image's copies: its own, with a JPEG's ending."""
    if name.lower().endswith((".jpg", ".jpeg")):
        return name
    place = Path(f"{name}.jpg")
    if len(os.fsencode(place.name)) > LONGEST_NAME:
        digest = hashlib.sha256(os.fsencode(name)).hexdigest()[:16]
        place = place.with_name(f"{place.name[:50]}_{digest}.jpg")
    return str(place)


def load_frost(folder: Path, size: int) -> Photographs:
    """Return the photographs of frost in a folder, with values from 0 to 1.

    Raises:
        ValueError: The folder is empty, or a photograph is too small.
    """
    photographs = {
        path: np.asarray(load_rgb(path, upright=False)) / 255 for path in find_images(folder)
    }
    small = [path.name for path, pixels in photographs.items() if min(pixels.shape[:2]) < size]
    rule = f"has photographs of frost with less than {size} pixels per side"
    refuse(folder, {rule: small})
    return list(photographs.values())


def _begin(out: Path, how: CopyOptions, folder: Path) -> None:
    """Create the folder, or raise an error if it holds something else."""
    note = json.loads(json.dumps({**asdict(how), "images": str(folder.resolve())}))
    file = out / NOTE
    before = read_json(file) if file.is_file() else {}
    options = before if isinstance(before, dict) else {}
    is_foreign = not file.is_file() and out.is_dir() and any(out.iterdir())
    faults = {
        "has a copy with other options (pass another out=)": [
            key for key in note if file.is_file() and options.get(key) != note[key]
        ],
        "holds other files than a corrupted copy; pass another out=": is_foreign,
    }
    refuse(out, faults)
    out.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")


def _report(progress: Callable[[int, int], None] | None, count: int, total: int) -> None:
    if progress is not None:
        progress(count, total)


def choose_kinds(text: str) -> tuple[str, ...]:
    """Return the kinds in a comma-separated text, in the paper's order; all if it is empty.

    Raises:
        ValueError: A name is unknown.
    """
    kinds: Sequence[str] = text.split(",") if text else KINDS
    strays = [name for name in kinds if name not in KINDS]
    refuse("kinds", {f"must be of {', '.join(KINDS)}, not": strays})
    return tuple(kind for kind in KINDS if kind in kinds)
