"""Finds the images of an export for any spelling of their paths."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from datamodules.files.folders import first_few, list_images, require_names
from datamodules.files.headers import THREADS, read_header
from datamodules.files.text_files import nfc

Size = tuple[int, int]  # width, height
UPLOADED = re.compile(r"^[0-9a-f]{8}-")  # prefix that Label Studio adds to uploaded files


class Images:
    """The images below a folder, by path.

    Tools write the paths of their server or of another machine. An image is therefore matched by
    the longest ending of its path that exists here.

    Args:
        folder: Root of the export.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names = list_images(folder)
        self._by_path = {nfc(name): name for name in self.names}
        self._by_name: dict[str, list[str]] = {}
        self._by_stem: dict[str, list[str]] = {}
        for name in self.names:
            self._by_name.setdefault(nfc(name).rpartition("/")[2], []).append(name)
            self._by_stem.setdefault(nfc(name).rpartition(".")[0], []).append(name)

    def find(self, name: str, near: Sequence[str] = ("",)) -> str | None:
        """Return the path of an image relative to the folder; None if it is missing.

        Args:
            name: Name in an annotation file.
            near: Folders to search first.

        Raises:
            ValueError: Several images have the name.
        """
        path = nfc(name).replace("\\", "/")
        for place in near:
            paths = self._by_path.get(posixpath.normpath(f"{place or '.'}/{path}"))
            if paths is not None:
                return paths
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        for start in range(len(parts)):
            paths = self._by_path.get("/".join(parts[start:]))
            if paths is not None:
                return paths
        last = parts[-1] if parts else ""
        candidates = self._by_name.get(last) or self._by_name.get(UPLOADED.sub("", last), [])
        if len(candidates) > 1:
            raise ValueError(
                f"{self.folder} has several images {parts[-1]}: {first_few(candidates)}; "
                f"the annotations name {name}: rename or remove the others"
            )
        return candidates[0] if candidates else None

    def find_stem(self, stem: str, near: Sequence[str] = ("",)) -> str | None:
        """Return the path of the only image with this path and any ending; else None."""
        for place in near:
            candidates = self._by_stem.get(nfc(f"{place}/{stem}" if place else stem), [])
            if len(candidates) == 1:
                return candidates[0]
        return None

    def find_all(
        self, names: Collection[str], source: Path, remedy: str, near: Sequence[str] = ("",)
    ) -> dict[str, str]:
        """Return the path of each image.

        Args:
            names: Names in an annotation file.
            source: The annotation file, for messages.
            remedy: Advice for missing images.
            near: Folders to search first.

        Raises:
            FileNotFoundError: Images are missing.
        """
        paths = {name: self.find(name, near) for name in names}
        self.require_found([n for n, place in paths.items() if place is None], source, remedy)
        return {name: place for name, place in paths.items() if place is not None}

    def require_found(self, missing: Collection[str], source: Path, remedy: str) -> None:
        """Raise ``FileNotFoundError`` naming the missing images, if any."""
        require_names(missing, f"images of {source} are missing in {self.folder}", remedy)

    def list_folder(self, folder: str, *, nested: bool = True) -> list[str]:
        """Return the images of a folder.

        Args:
            folder: Path relative to the root, with slashes; empty for the root.
            nested: Include sub-folders.
        """
        prefix = f"{nfc(folder)}/" if folder else ""
        inside = [name for name in self.names if nfc(name).startswith(prefix)]
        return (
            inside if nested else [name for name in inside if "/" not in nfc(name)[len(prefix) :]]
        )

    def sizes(self, names: Sequence[str]) -> list[Size]:
        """Return width and height of images, rotated by their EXIF orientation."""

        def size(name: str) -> Size:
            header = read_header(self.folder / name, upright=True)
            return header.width, header.height

        with ThreadPoolExecutor(THREADS) as pool:
            return list(pool.map(size, names))
