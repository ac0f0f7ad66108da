"""Lists the images of class folders and reports skipped and nested files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Set
from pathlib import Path

from datamodules.files.console import log
from datamodules.files.folders import (
    IMAGE_SUFFIXES,
    file_suffix,
    first_few,
    list_images,
    skipped_notice,
)
from datamodules.files.text_files import FolderNames, nfc


class ClassListing:
    """Listing of class folders, with notices for the user.

    Args:
        folder: Name of the folder in messages.
        suffixes: Endings of images.
    """

    def __init__(self, folder: Path, suffixes: Set[str] = IMAGE_SUFFIXES) -> None:
        self.folder, self.suffixes = folder, suffixes
        self.skipped: Counter[str] = Counter()
        self.nested: list[str] = []
        self.outside: list[str] = []

    def images(self, folder: Path, names: Iterable[str]) -> dict[str, list[str]]:
        """Return the images of each class, relative to the folder; [] where its folder is absent.

        Images in sub-folders belong to the outermost folder, as in torchvision.
        """
        on_disk = FolderNames(folder)
        images = {name: self._images(folder, on_disk.find(name)) for name in names}
        self.nested += [
            image for files in images.values() for image in files if image.count("/") > 1
        ]
        for entry in folder.iterdir():
            if not entry.name.startswith(".") and not entry.is_dir():
                suffix = file_suffix(entry.name)
                if suffix in self.suffixes:
                    self.outside.append(entry.name)
        return images

    def _images(self, folder: Path, name: str | None) -> list[str]:
        if name is None or not (folder / name).is_dir():
            return []
        images = list_images(folder / name, self.skipped, self.suffixes)
        return [f"{name}/{image}" for image in images]

    def log(self) -> None:
        """Log one line per kind of finding."""
        for line in self.notices():
            log(line)

    def notices(self) -> list[str]:
        """Return one line per kind of finding."""
        lines = skipped_notice(self.folder, self.skipped)
        if self.outside:
            lines.append(
                f"{self.folder}: {_counted(self.outside)} skipped, outside any class folder: "
                f"{first_few(sorted(self.outside), 2)}"
            )
        if self.nested:
            lines.append(
                f"{self.folder}: {_counted(self.nested)} in sub-folders "
                f"({first_few(self.nested, 2)}) and labelled by the outermost folder, as in "
                "torchvision; timm labels by the innermost folder"
            )
        return lines


def _counted(images: list[str]) -> str:
    return "1 image is" if len(images) == 1 else f"{len(images)} images are"


def list_class_images(
    folder: Path, names: Iterable[str], suffixes: Set[str] = IMAGE_SUFFIXES
) -> dict[str, list[str]]:
    """Return the images of each class, relative to the folder; log skipped and nested files."""
    listing = ClassListing(folder, suffixes)
    images = listing.images(folder, names)
    listing.log()
    return images


def nfc_names(folder: Path, names: Iterable[str]) -> list[str]:
    """Return the sorted names of class folders in NFC.

    Raises:
        ValueError: Two folders have the same name, one in NFC and one in NFD.
    """
    composed = sorted(map(nfc, names))
    twice = [name for name, count in Counter(composed).items() if count > 1]
    if twice:
        raise ValueError(
            f"{folder} has two folders of the same name, once with composed accents (NFC) and once "
            f"with decomposed ones (NFD): {first_few(twice)}; move all images into one of them"
        )
    return composed
