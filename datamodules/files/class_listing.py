"""Images of class folders, with a line about what is skipped and what lies in sub-folders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from datamodules.files import IMAGE_SUFFIXES, first_few, list_images, skipped_notice, suffix_of
from datamodules.files.console import say
from datamodules.files.text_files import FolderNames, nfc


class Listing:
    """List class folders and collect what their user should know.

    Args:
        folder: What messages call it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.skipped: Counter[str] = Counter()
        self.nested: list[str] = []
        self.outside: list[str] = []

    def images(self, folder: Path, names: Iterable[str]) -> dict[str, list[str]]:
        """Return the images of each class, relative to the folder; none where its folder is absent.

        Images in sub-folders belong to the outermost folder, as in torchvision.
        """
        on_disk = FolderNames(folder)
        found = {name: self._images(folder, on_disk.find(name)) for name in names}
        self.nested += [image for held in found.values() for image in held if image.count("/") > 1]
        for entry in folder.iterdir():
            if not entry.name.startswith(".") and not entry.is_dir():
                suffix = suffix_of(entry.name)
                if suffix in IMAGE_SUFFIXES:
                    self.outside.append(entry.name)
        return found

    def _images(self, folder: Path, name: str | None) -> list[str]:
        if name is None or not (folder / name).is_dir():
            return []
        return [f"{name}/{image}" for image in list_images(folder / name, self.skipped)]

    def say(self) -> None:
        """Log a line for each kind of what was found."""
        for line in self.notices():
            say(line)

    def notices(self) -> list[str]:
        """Return the lines."""
        lines = skipped_notice(self.folder, self.skipped)
        if self.outside:
            lines.append(
                f"{self.folder}: {_counted(self.outside)} skipped, in no class folder: "
                f"{first_few(sorted(self.outside), 2)}"
            )
        if self.nested:
            lines.append(
                f"{self.folder}: {_counted(self.nested)} in sub-folders "
                f"({first_few(self.nested, 2)}) and of the outermost folder's class, as in "
                "torchvision; timm names classes by the innermost folder"
            )
        return lines


def _counted(images: list[str]) -> str:
    return "1 image is" if len(images) == 1 else f"{len(images)} images are"


def list_classes(folder: Path, names: Iterable[str]) -> dict[str, list[str]]:
    """Return the images of each class, relative to the folder; log what is skipped or nested."""
    listing = Listing(folder)
    found = listing.images(folder, names)
    listing.say()
    return found


def composed_names(folder: Path, names: Iterable[str]) -> list[str]:
    """Return the sorted names of class folders in NFC.

    Raises:
        ValueError: Two have the same name, in NFC and in NFD.
    """
    composed = sorted(map(nfc, names))
    twice = [name for name, count in Counter(composed).items() if count > 1]
    if twice:
        raise ValueError(
            f"{folder} has two folders of the same name, once with composed accents (NFC) and once "
            f"with decomposed ones (NFD): {first_few(twice)}; move all images into one of them"
        )
    return composed
