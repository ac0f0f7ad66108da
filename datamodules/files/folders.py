"""Finds images and folders on disk and reports what is missing or skipped."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Collection, Iterable, Set
from pathlib import Path

from datamodules.files.console import log

# torchvision's and timm's endings, and further names of what Pillow decodes.
IMAGE_SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".gif", ".webp", ".avif", ".tif", ".tiff",
     ".ppm", ".pgm", ".pbm", ".pnm", ".jp2"}
)  # fmt: skip
LOSSY = frozenset({".jpg", ".jpeg", ".jpe", ".jfif", ".webp", ".avif", ".jp2"})
HIDDEN, NO_ENDING = "hidden", "no ending"  # kinds of skipped files, beside endings
VALIDATION = ("val", "valid", "validation")  # names of the folder of validation images


def first_few(items: Iterable[object], limit: int = 5) -> str:
    """Return the first items as text, with the total where more exist."""
    values = list(items)
    text = ", ".join(str(item) for item in values[:limit])
    return f"{text}, ... ({len(values)} in all)" if len(values) > limit else text


def file_suffix(name: str) -> str:
    """Return the ending of a file name in lower case, such as ``.jpg``."""
    return os.path.splitext(name)[1].lower()  # noqa: PTH122 - a third of pathlib's time


@functools.cache
def _system_devices() -> frozenset[int]:
    """Return the devices of the kernel's file systems, which have endless files."""
    places = [Path(name) for name in ("/proc", "/sys", "/dev") if Path(name).is_dir()]
    return frozenset(place.stat().st_dev for place in places) - {Path("/").stat().st_dev}


def reject_system_folder(folder: Path) -> None:
    """Raise an error for the root of the disk and for the kernel's folders such as /proc.

    Raises:
        ValueError: The folder belongs to the operating system.
    """
    if folder.stat().st_dev in _system_devices() or folder.resolve() == Path("/"):
        raise ValueError(
            f"{folder} is a folder of the operating system; pass the folder of your images"
        )


def list_images(
    folder: Path, skipped: Counter[str] | None = None, suffixes: Set[str] = IMAGE_SUFFIXES
) -> list[str]:
    """Return the sorted names of the images in a folder and its sub-folders.

    Args:
        folder: Names are relative to it, with slashes: ``1.jpg``, ``close/2.jpg``.
        skipped: Counter of the other files by ending. Hidden files with an image's ending are
            counted; hidden folders are skipped.
        suffixes: Endings of images.
    """
    reject_system_folder(folder)
    return sorted(_images_in(folder, "", Counter() if skipped is None else skipped, (), suffixes))


def _images_in(
    folder: Path,
    prefix: str,
    skipped: Counter[str],
    above: tuple[tuple[int, int], ...],
    suffixes: Set[str],
) -> list[str]:
    """List the images of a folder, skipping links to parent folders and kernel folders."""
    status = folder.stat()
    place = (status.st_dev, status.st_ino)
    if place in above or status.st_dev in _system_devices():
        return []
    images = []
    with os.scandir(folder) as entries:
        for entry in entries:
            suffix = os.path.splitext(entry.name)[1].lower()  # noqa: PTH122 - see ``file_suffix``
            if not entry.is_file(follow_symlinks=False) and Path(entry).is_dir():
                if not entry.name.startswith("."):
                    inner = f"{prefix}{entry.name}/"
                    images += _images_in(Path(entry), inner, skipped, (*above, place), suffixes)
            elif entry.name.startswith("."):
                skipped[HIDDEN] += suffix in suffixes
            elif suffix in suffixes:  # a dangling link counts, so that decoding names it
                images.append(f"{prefix}{entry.name}")
            else:
                skipped[suffix or NO_ENDING] += 1
    return images


def skipped_notice(folder: Path, skipped: Counter[str]) -> list[str]:
    """Return the line about skipped files with their endings; [] if all files are images."""
    total = skipped.total()
    if not total:
        return []
    counted = [f"{count} {kind}" for kind, count in skipped.most_common() if count]
    why = "1 file is skipped because of its ending"
    if total > 1:
        why = f"{total} files are skipped because of their endings"
    return [f"{folder}: {why}: {first_few(counted, 10)}"]


def validation_folder(root: Path) -> Path:
    """Return the folder of validation images: ``val``, ``valid`` or ``validation``.

    Raises:
        ValueError: More than one of them exists.
    """
    folders = [root / name for name in VALIDATION if (root / name).is_dir()]
    if len(folders) > 1:
        raise ValueError(
            f"{root} has several folders of validation images: "
            f"{', '.join(folder.name for folder in folders)}; keep one of them"
        )
    return folders[0] if folders else root / VALIDATION[0]


def list_folders(folder: Path) -> list[str]:
    """Return the sorted names of the visible folders directly in a folder."""
    reject_system_folder(folder)
    with os.scandir(folder) as entries:
        # Path.is_dir, unlike the entry's own, is False for a link that leads to itself.
        return sorted(e.name for e in entries if not e.name.startswith(".") and Path(e).is_dir())


def require_folder(folder: Path, remedy: str) -> None:
    """Raise ``FileNotFoundError`` with the remedy if the folder is missing."""
    if not folder.is_dir():
        raise FileNotFoundError(f"folder {folder} does not exist; {remedy}")


def require_names(missing: Collection[str], noun: str, remedy: str) -> None:
    """Raise ``FileNotFoundError`` naming the first few missing files, if any.

    A file that differs from the first missing one only in its ending is named as well.
    """
    if missing:
        raise FileNotFoundError(
            f"{len(missing)} {noun}: {first_few(sorted(missing))}; {remedy}"
            f"{_other_ending(Path(min(missing)))}"
        )


def _other_ending(path: Path) -> str:
    """Return the file that exists in place of a missing one, and why it is not used."""
    if path.exists() or not path.parent.is_dir():
        return ""
    stem = path.stem.lower()
    beside = sorted(file.name for file in path.parent.iterdir() if file.stem.lower() == stem)
    if not beside:
        return ""
    why = f"the name must be {path.name}"
    if path.suffix == ".png" and file_suffix(beside[0]) in LOSSY:
        why = "masks must be PNG, as lossy compression changes labels; export them again"
    elif path.suffix == ".png" and file_suffix(beside[0]) != path.suffix:
        why = "masks must be PNG; convert them"
    return f". {path.parent / beside[0]} is there, but not used: {why}"


def find_images(path: str | Path, suffixes: Set[str] = IMAGE_SUFFIXES) -> list[Path]:
    """Return the image itself, or all images of a folder and its sub-folders, to predict."""
    path = Path(path).expanduser()
    if path.is_file():
        return [path]
    skipped: Counter[str] = Counter()
    names = list_images(path, skipped, suffixes) if path.is_dir() else []
    if not names:
        raise FileNotFoundError(
            f"the input {path} must be an image or a folder of images; known endings: "
            f"{sorted(suffixes)}"
        )
    for line in skipped_notice(path, skipped):
        log(line)
    return [path / name for name in names]
