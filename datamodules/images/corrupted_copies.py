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
from datamodules.files import first_few, images_at, list_folders, load_rgb, validation_folder
from datamodules.files.class_listing import list_classes
from datamodules.files.text_files import read_json
from datamodules.images.transforms import BoundedResize
from datamodules.loading.shared_memory import check_shared_memory
from datamodules.loading.workers import end_with_parent

NOTE = "corrupted.json"  # in the copy's folder: how it was made
LONGEST_NAME = 255  # bytes of a file's name
JPEG = {"quality": 85, "optimize": True}  # as the published files


@dataclass(frozen=True)
class Copy:
    """How a copy is made.

    Attributes:
        kinds: Of ``KINDS``.
        severities: From 1 to 5.
        size: Side of the copies.
        resize: Shorter side of the images before the central crop of ``size``.
        seed: Decides all that is random, with the image's name, the kind and the severity.
        frost: Folder of photographs of frost; without one textures are made.
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
    how: Copy,
    workers: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Write ``out/<kind>/<severity>/<class>/<image>``; files that are there already stay.

    Args:
        root: Holds class folders, or ``val`` (``valid``, ``validation``) with class folders.
        out: New, or begun by the same call.
        how: What is made.
        workers: Processes.
        progress: Told how many images of how many are done.

    Returns:
        Number of images, each in all kinds and severities.

    Raises:
        ValueError: No class folders, an image that is broken, or a folder with another copy.
    """
    if how.resize < how.size:
        raise ValueError(f"resize={how.resize} is below size={how.size}, which is cut out of it")
    inner = validation_folder(root)
    folder = inner if inner.is_dir() else root
    if not folder.is_dir():
        raise ValueError(f"root={root} is no folder; pass one that holds class folders")
    found = list_classes(folder, list_folders(folder))
    names = [name for held in found.values() for name in held]
    if not names:
        raise ValueError(f"{folder} holds no class folders with images: <class>/*.jpg")
    targets = {saved_name(name) for name in names}
    if len(targets) < len(names):
        raise ValueError(f"{folder} has images that differ in their endings alone; rename them")
    if out.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"out={out} lies in the folder that is copied; pass one beside it")
    _begin(out, how, folder)
    frost = photographs(Path(how.frost), how.size) if how.frost else ()
    work = partial(write_image, folder, out, how, frost)
    if workers == 1:
        for done, _ in enumerate(map(work, names), start=1):
            _tell(progress, done, len(names))
        return len(names)
    # Forked: a fresh process would take longer to import than many images take.
    check_shared_memory("workers=1")
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(workers, context, end_with_parent) as pool:
        for done, _ in enumerate(pool.map(work, names), start=1):
            _tell(progress, done, len(names))
    return len(names)


def write_image(folder: Path, out: Path, how: Copy, frost: Photographs, name: str) -> None:
    """All corruptions of one image that are not there yet."""
    missing = {
        (kind, severity): target
        for kind in how.kinds
        for severity in how.severities
        if not (target := out / kind / str(severity) / saved_name(name)).exists()
    }
    if not missing:
        return
    crop = transforms.CenterCrop(how.size)
    resize = BoundedResize(how.resize, crop.size, transforms.InterpolationMode.BILINEAR)
    prepare = transforms.Compose([resize, crop])
    image: Image.Image = prepare(load_rgb(folder / name, upright=False))
    for (kind, severity), target in missing.items():
        made = corrupt(image, kind, severity, generator(how.seed, name, kind, severity), frost)
        target.parent.mkdir(parents=True, exist_ok=True)
        begun = target.with_name(f".{os.getpid()}.part")  # names may have 255 bytes already
        try:
            made.save(begun, "JPEG", **JPEG)
            begun.replace(target)
        except OSError as error:
            begun.unlink(missing_ok=True)
            raise OSError(f"{target} could not be written ({error.strerror or error})") from error


def generator(seed: int, name: str, kind: str, severity: int) -> np.random.Generator:
    """The random numbers of one corrupted image."""
    digest = hashlib.sha256(os.fsencode(name)).digest()[:8]
    key = [seed, int.from_bytes(digest, "big"), KINDS.index(kind), severity]
    return np.random.default_rng(key)


def saved_name(name: str) -> str:
    """What the copies of an image are called: as itself, with a JPEG's ending."""
    if name.lower().endswith((".jpg", ".jpeg")):
        return name
    place = Path(f"{name}.jpg")
    if len(os.fsencode(place.name)) > LONGEST_NAME:
        digest = hashlib.sha256(os.fsencode(name)).hexdigest()[:16]
        place = place.with_name(f"{place.name[:50]}_{digest}.jpg")
    return str(place)


def photographs(folder: Path, size: int) -> Photographs:
    """The photographs of frost in a folder, from 0 to 1.

    Raises:
        ValueError: There are none, or one is too small.
    """
    found = {path: np.asarray(load_rgb(path, upright=False)) / 255 for path in images_at(folder)}
    small = [path.name for path, pixels in found.items() if min(pixels.shape[:2]) < size]
    if small:
        raise ValueError(
            f"photographs of frost must have {size} pixels a side at least: {first_few(small)}"
        )
    return list(found.values())


def _begin(out: Path, how: Copy, folder: Path) -> None:
    """Make the folder, or refuse one that holds something else."""
    note = json.loads(json.dumps({**asdict(how), "images": str(folder.resolve())}))
    file = out / NOTE
    if file.is_file():
        before = read_json(file)
        known = before if isinstance(before, dict) else {}
        differ = [key for key in note if known.get(key) != note[key]]
        if differ:
            raise ValueError(
                f"{out} has a copy made otherwise ({', '.join(differ)}); pass another out="
            )
    elif out.is_dir() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty and no copy made here; pass another out=")
    out.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")


def _tell(progress: Callable[[int, int], None] | None, done: int, total: int) -> None:
    if progress is not None:
        progress(done, total)


def choose_kinds(text: str) -> tuple[str, ...]:
    """Kinds out of names with commas between them, in the paper's order; all for an empty text.

    Raises:
        ValueError: A name that is none.
    """
    asked: Sequence[str] = text.split(",") if text else KINDS
    unknown = [name for name in asked if name not in KINDS]
    if unknown:
        raise ValueError(f"no corruption {', '.join(unknown)}; there are {', '.join(KINDS)}")
    return tuple(kind for kind in KINDS if kind in asked)
