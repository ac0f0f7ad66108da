"""Find images on disk, decode them strictly, and word complaints about files."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import stat
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError, features

from datamodules.files.console import say

# torchvision's and timm's endings, and further names of what Pillow decodes.
IMAGE_SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".gif", ".webp", ".avif", ".tif", ".tiff",
     ".ppm", ".pgm", ".pbm", ".pnm", ".jp2"}
)  # fmt: skip
LOSSY = frozenset({".jpg", ".jpeg", ".jpe", ".jfif", ".webp", ".avif", ".jp2"})
HIDDEN, NO_ENDING = "hidden", "no ending"  # kinds of skipped files, beside endings
VALIDATION = ("val", "valid", "validation")  # names of the folder of validation images
ORIENTATION, UPRIGHT = 0x0112, 1  # a tag of EXIF, and its usual value
LARGEST_BYTE = 255
MAX_PIXELS = 178_956_970  # Pillow refuses larger images as decompression bombs.


def first_few(items: Iterable[object], limit: int = 5) -> str:
    """The first items as text, with the total where more exist."""
    listed = list(items)
    text = ", ".join(str(item) for item in listed[:limit])
    return f"{text}, ... ({len(listed)} in all)" if len(listed) > limit else text


def suffix_of(name: str) -> str:
    """Return the ending of a file name in lower case, such as ``.jpg``."""
    return os.path.splitext(name)[1].lower()  # noqa: PTH122 - a third of pathlib's time


@functools.cache
def _system_devices() -> frozenset[int]:
    """Return the devices of the kernel's file systems, whose files have no end."""
    places = [Path(name) for name in ("/proc", "/sys", "/dev") if Path(name).is_dir()]
    return frozenset(place.stat().st_dev for place in places) - {Path("/").stat().st_dev}


def refuse_system_folder(folder: Path) -> None:
    """Raise an error for the root of the disk and for folders of the kernel such as /proc.

    Raises:
        ValueError: It is one.
    """
    if folder.stat().st_dev in _system_devices() or folder.resolve() == Path("/"):
        raise ValueError(
            f"{folder} is a folder of the operating system; pass the folder of your images"
        )


def list_images(folder: Path, skipped: Counter[str] | None = None) -> list[str]:
    """Return the sorted names of the images in a folder and its sub-folders.

    Args:
        folder: Names are relative to it, with slashes: ``1.jpg``, ``close/2.jpg``.
        skipped: Counts the other files by their endings. Hidden files count where they end as
            images do; hidden folders are skipped.
    """
    refuse_system_folder(folder)
    return sorted(_images_in(folder, "", Counter() if skipped is None else skipped, ()))


def _images_in(
    folder: Path, prefix: str, skipped: Counter[str], above: tuple[tuple[int, int], ...]
) -> Iterator[str]:
    """Yield the images of a folder; links to folders above and kernel folders are skipped."""
    status = folder.stat()
    place = (status.st_dev, status.st_ino)
    if place in above or status.st_dev in _system_devices():
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            suffix = suffix_of(entry.name)
            if not entry.is_file(follow_symlinks=False) and Path(entry).is_dir():
                if not entry.name.startswith("."):
                    inner = f"{prefix}{entry.name}/"
                    yield from _images_in(Path(entry), inner, skipped, (*above, place))
            elif entry.name.startswith("."):
                skipped[HIDDEN] += suffix in IMAGE_SUFFIXES
            elif suffix in IMAGE_SUFFIXES:  # a dangling link counts, so that decoding names it
                yield f"{prefix}{entry.name}"
            else:
                skipped[suffix or NO_ENDING] += 1


def skipped_notice(folder: Path, skipped: Counter[str]) -> list[str]:
    """Return the line about skipped files with their endings; none if no file was skipped."""
    total = skipped.total()
    if not total:
        return []
    counted = [f"{count} {kind}" for kind, count in skipped.most_common() if count]
    why = "1 file is skipped because of its ending"
    if total > 1:
        why = f"{total} files are skipped because of their endings"
    return [f"{folder}: {why}: {first_few(counted, 10)}"]


def validation_folder(root: Path) -> Path:
    """Return the folder of validation images: ``val``, or ``valid`` or ``validation`` instead.

    Raises:
        ValueError: More than one of them exists.
    """
    there = [root / name for name in VALIDATION if (root / name).is_dir()]
    if len(there) > 1:
        raise ValueError(
            f"{root} has several folders of validation images: "
            f"{', '.join(folder.name for folder in there)}; keep one of them"
        )
    return there[0] if there else root / VALIDATION[0]


def list_folders(folder: Path) -> list[str]:
    """Sorted names of the visible folders directly in a folder."""
    refuse_system_folder(folder)
    with os.scandir(folder) as entries:
        # Path.is_dir, unlike the entry's own, is False for a link that leads to itself.
        return sorted(e.name for e in entries if not e.name.startswith(".") and Path(e).is_dir())


def require_folder(folder: Path, remedy: str) -> None:
    """Raise ``FileNotFoundError`` with the remedy unless the folder exists."""
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}; {remedy}")


def require_names(missing: Collection[str], what: str, remedy: str) -> None:
    """Raise ``FileNotFoundError`` naming the first few missing files, if there are any.

    A file that differs from the first missing one in its ending alone is named, too.
    """
    if missing:
        raise FileNotFoundError(
            f"{len(missing)} {what}: {first_few(sorted(missing))}; {remedy}"
            f"{_other_ending(Path(min(missing)))}"
        )


def _other_ending(wanted: Path) -> str:
    """Return which file is there in place of a missing one, and why it is not used."""
    if wanted.exists() or not wanted.parent.is_dir():
        return ""
    stem = wanted.stem.lower()
    beside = sorted(one.name for one in wanted.parent.iterdir() if one.stem.lower() == stem)
    if not beside:
        return ""
    why = f"the name must be {wanted.name}"
    if wanted.suffix == ".png" and suffix_of(beside[0]) in LOSSY:
        why = "masks must be PNG, as lossy compression changes labels; export them again"
    elif wanted.suffix == ".png" and suffix_of(beside[0]) != wanted.suffix:
        why = "masks must be PNG; convert them"
    return f". {wanted.parent / beside[0]} is there, but not used: {why}"


def images_at(path: str | Path) -> list[Path]:
    """Return the image itself, or all images of a folder and its sub-folders, for prediction."""
    path = Path(path).expanduser()
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"the input {path} is neither an image nor a folder of images")
    skipped: Counter[str] = Counter()
    names = list_images(path, skipped)
    if not names:
        raise ValueError(f"no images in the input {path}; known endings: {sorted(IMAGE_SUFFIXES)}")
    for line in skipped_notice(path, skipped):
        say(line)
    return [path / name for name in names]


def decode(path: str | Path) -> Image.Image:
    """Decode a whole image file of any mode, or say why that is impossible.

    Source: a strict stand-in for OpenCV's reader, which fills the missing half of a JPEG with grey.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is empty, no image, truncated or too large.
    """
    # Given a name, Pillow maps an uncompressed TIFF into memory and scrambles one that it turns.
    with STRICT, readable(path), plain_file(path).open("rb") as file, Image.open(file) as image:
        refuse_large(image)
        image.load()
        return image


def refuse_large(image: Image.Image) -> None:
    """Raise an error for more pixels than are decoded, known from the header.

    Raises:
        DecompressionBombError: Which ``readable`` words.
    """
    if image.width * image.height > MAX_PIXELS:
        raise Image.DecompressionBombError(f"{image.width}x{image.height}")


def decode_bytes(content: bytes, name: str) -> Image.Image:
    """Decode the bytes of a whole image file as ``decode`` does.

    Args:
        content: Of the file.
        name: What messages call it.

    Raises:
        ValueError: The file is empty, no image, truncated or too large.
    """
    try:
        with STRICT, readable(name), Image.open(io.BytesIO(content)) as image:
            refuse_large(image)
            image.load()
            return image
    except (FileNotFoundError, NotADirectoryError):  # readable has looked for it on the disk
        reason = "is no image, whatever its name says" if content else "is empty (0 bytes)"
        raise ValueError(f"{name} {reason}; replace or remove it") from None


class Strictness(contextlib.AbstractContextManager[None]):
    """Lets Pillow refuse truncated files: some libraries switch tolerance on for everybody.

    Pillow has one switch for all threads. It is put back when the last thread has decoded.
    """

    def __init__(self) -> None:
        self._lock, self._users, self._tolerant = threading.Lock(), 0, False

    def __enter__(self) -> None:
        with self._lock:
            if self._users == 0:
                self._tolerant = ImageFile.LOAD_TRUNCATED_IMAGES
            self._users += 1
            ImageFile.LOAD_TRUNCATED_IMAGES = False

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                ImageFile.LOAD_TRUNCATED_IMAGES = self._tolerant


STRICT = Strictness()


def plain_file(path: str | Path) -> Path:
    """The path, if reading it can neither wait for another program nor last for ever.

    Raises:
        OSError: A pipe, a device, a socket or a folder.
    """
    path = Path(path)
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("it is a pipe, device or folder, no plain file")
    return path


@contextlib.contextmanager
def readable(path: str | Path) -> Iterator[None]:
    """Let what Pillow raises over a file leave as an error that says what is wrong with it.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is empty, no image, truncated or too large.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(f"image file {path} does not exist") from error
    except UnidentifiedImageError as error:
        empty = Path(path).stat().st_size == 0
        reason = "is empty (0 bytes)" if empty else "is not an image, whatever its name says"
        if suffix_of(str(path)) == ".avif" and not features.check("avif"):
            raise ValueError(
                f"{path}: this Pillow cannot read AVIF; type pip install -U pillow"
            ) from error
        raise ValueError(f"{path} {reason}; replace or remove it") from error
    except Image.DecompressionBombError as error:
        raise ValueError(f"{path} has more than {MAX_PIXELS:,} pixels; make it smaller") from error
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"{path} is truncated or damaged ({error}); replace it") from error


def to_rgb(image: Image.Image, path: str | Path) -> Image.Image:
    """Convert any mode to 8-bit RGB by fixed rules.

    Grey is repeated, palettes are looked up, alpha is dropped, CMYK goes through Pillow's formula,
    16-bit values keep their high byte, animations their first frame.
    """
    if image.mode == "F":
        raise ValueError(
            f"{path} holds floating-point pixels; save it with 8 or 16 bits per channel"
        )
    if image.mode.startswith("I"):
        values = np.asarray(image).astype(np.int64)  # Pillow alone would clip 16 bits at 255.
        if 0 < values.max() <= LARGEST_BYTE:
            raise ValueError(
                f"{path} has 16 bits per pixel, but no value above {values.max()}: it would be "
                "read as black; save it with 8 bits"
            )
        return Image.fromarray((values.clip(0, 65535) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode == "P":
        image = image.convert("RGBA")
    return image if image.mode == "RGB" else image.convert("RGB")


def load_rgb(path: str | Path, *, upright: bool) -> Image.Image:
    """Decode an image file strictly into 8-bit RGB.

    Args:
        path: The image file.
        upright: Turn the image as its EXIF orientation says. OpenCV does (dense tasks), timm and
            torchvision do not (classification), and published numbers depend on each.
    """
    image = decode(path)
    # Pillow would copy an image that stands upright.
    if upright and not is_upright(image):
        image = ImageOps.exif_transpose(image)
    return to_rgb(image, path)


def is_upright(image: Image.Image) -> bool:
    """Whether an image stands as its EXIF data say that it is to be seen."""
    return bool(image.getexif().get(ORIENTATION, UPRIGHT) == UPRIGHT)
