"""CIFAR-10 and CIFAR-100 from their original Python pickles, read without executing their code."""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from datamodules.base import Split
from datamodules.files.integers import format_value, integer_list
from datamodules.files.text_files import nfc, read_file
from datamodules.images.classification import ClassificationDataModule, Sample, make_sample
from datamodules.images.transforms import Augmentation, PaperAugmentation, Transform
from datamodules.loading.sampling import SeededDataset

SIDE = 32


@dataclass(frozen=True)
class Archive:
    """File names and keys of one of the two datasets.

    Attributes:
        name: Name of the dataset.
        folder: Folder that the archive unpacks to.
        train: Files of the training set.
        test: File of the test set.
        meta: File of the class names.
        labels: Key of the labels.
        names: Key of the class names in ``meta``.
        classes: Number of classes.
    """

    name: str
    folder: str
    train: tuple[str, ...]
    test: str
    meta: str
    labels: str
    names: str
    classes: int


CIFAR100 = Archive(
    name="CIFAR-100",
    folder="cifar-100-python",
    train=("train",),
    test="test",
    meta="meta",
    labels="fine_labels",
    names="fine_label_names",
    classes=100,
)
CIFAR10 = Archive(
    name="CIFAR-10",
    folder="cifar-10-batches-py",
    train=tuple(f"data_batch_{number}" for number in range(1, 6)),
    test="test_batch",
    meta="batches.meta",
    labels="labels",
    names="label_names",
    classes=10,
)


class CIFAR100DataModule(ClassificationDataModule):
    """The 100 fine classes of CIFAR-100, resized to ``image_size``; its test set is ``val``.

    Layout: the files ``train``, ``test`` and ``meta`` of ``cifar-100-python``.

    Source: https://www.cs.toronto.edu/~kriz/cifar.html

    Args:
        root: The unpacked folder of the archive or its parent folder.
        augmentation: Makes the transforms; None means the papers' recipe, uncropped in evaluation.
        **options: Options of ``ClassificationDataModule``.
    """

    archive: ClassVar[Archive] = CIFAR100
    kept_side = SIDE
    layout = "cifar-100-python/train, test and meta"
    example = "data=cifar100 data.root=/data/cifar100"

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        augmentation: Augmentation | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            root, augmentation=augmentation or PaperAugmentation(crop_pct=1.0), **options
        )

    def build(self) -> dict[Any, SeededDataset]:
        """Read the files and check them."""
        folder, archive = self._unpacked(), self.archive
        self.class_names = _class_names(folder / archive.meta, archive)
        make = self.augmentation
        train = [folder / name for name in archive.train]
        return {
            "train": self._split(train, make.train(self.image_size)),
            "val": self._split([folder / archive.test], make.eval(self.image_size)),
        }

    def notices(self, checked: Mapping[Split, int]) -> list[str]:
        """Return the notices, including classes without test images."""
        rows = cast("PixelRows", self.dataset("val").dataset)
        absent = sorted(set(range(self.num_classes)) - set(rows.labels.tolist()))
        return super().notices(checked) + self.absent_notice(absent)

    def _unpacked(self) -> Path:
        archive = self.archive
        files = (*archive.train, archive.test, archive.meta)
        for folder in (self.folder / archive.folder, self.folder):
            if all((folder / name).is_file() for name in files):
                return folder
        packed = list(self.folder.glob(f"{archive.name.lower()}-python*.tar.gz"))
        remedy = (
            f"unpack it: tar -xzf {packed[0]} -C {self.folder}"
            if packed
            else "pass the unpacked folder"
        )
        raise FileNotFoundError(f"{self.folder} lacks {self.layout}; {remedy}")

    def _split(self, paths: Sequence[Path], transform: Transform) -> SeededDataset:
        images, labels = [], []
        for path in paths:
            content = read_pickle(path, self.archive)
            images.append(check_images(path, content))
            labels.append(check_labels(path, content, len(images[-1]), self.archive))
        rows = PixelRows(paths, images, labels, transform)
        return self.seeded(rows, rows.describe)


class CIFAR10DataModule(CIFAR100DataModule):
    """CIFAR-10, resized to ``image_size``; its test set is ``val``.

    Layout: ``data_batch_1`` to ``data_batch_5``, ``test_batch`` and ``batches.meta``.

    Source: https://www.cs.toronto.edu/~kriz/cifar.html

    Args:
        root: The unpacked folder of the archive or its parent folder.
        **options: Options of ``CIFAR100DataModule``.
    """

    archive = CIFAR10
    layout = "cifar-10-batches-py/data_batch_1 to data_batch_5, test_batch and batches.meta"
    example = "data=cifar10 data.root=/data/cifar10"


class PixelRows:
    """Dataset of images in memory.

    Args:
        paths: Files that the images come from.
        images: Pixels (N, 3072) per file, channel by channel, row by row.
        labels: Classes (N,) per file.
        transform: Turns an RGB image into a tensor.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        images: Sequence[NDArray[np.uint8]],
        labels: Sequence[NDArray[np.int64]],
        transform: Transform,
    ) -> None:
        self.paths, self.transform = tuple(paths), transform
        self.images, self.labels = np.concatenate(images), np.concatenate(labels)
        self.ends = np.cumsum([len(rows) for rows in labels])

    def __len__(self) -> int:
        return len(self.labels)

    def describe(self, index: int) -> str:
        """Return the file and row of a sample, for error messages."""
        file = int(np.searchsorted(self.ends, index, side="right"))
        first = int(self.ends[file - 1]) if file else 0
        return f"{self.paths[file]}, row {index - first}"

    def __getitem__(self, index: int, /) -> Sample:
        """Return ``image`` (3, H, W), ``label`` and ``sample_id``."""
        pixels = self.images[index].reshape(3, SIDE, SIDE).transpose(1, 2, 0)
        image = Image.fromarray(np.ascontiguousarray(pixels))
        return make_sample(self.transform(image), int(self.labels[index]), index)


class ArrayUnpickler(pickle.Unpickler):
    """Unpickler of containers, numbers, texts and byte arrays; other names raise an error."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a stand-in for one of the few names that pickled numpy arrays need."""
        if (module, name) == ("numpy", "ndarray"):
            return PickledArray
        if (module, name) == ("numpy", "dtype"):
            return PickledType
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return _empty_array
        if (module, name) == ("_codecs", "encode"):
            return _latin1
        raise pickle.UnpicklingError(f"unexpected name {module}.{name}")


class PickledType:
    """Stand-in for numpy's dtype, which would accept any state from a file."""

    def __init__(self, code: bytes | str, *flags: object) -> None:
        name = code.decode("latin1") if isinstance(code, bytes) else code
        if name not in ("u1", "|u1"):
            raise pickle.UnpicklingError(f"dtype {name} found; CIFAR arrays must be uint8")

    def __setstate__(self, state: object) -> None:
        """Check the state of a plain type, which is redundant."""
        if not isinstance(state, tuple) or state[2:] != (None, None, None, -1, -1, 0):
            raise pickle.UnpicklingError(f"structured dtype found: {state!r:.80}")


class PickledArray:
    """Stand-in for numpy's array while a file is read.

    Attributes:
        values: The array; set by its state.
    """

    values: NDArray[np.uint8]

    def __setstate__(self, state: Any) -> None:
        """Build the array from its state."""
        if not isinstance(state, tuple) or len(state) != 5:
            raise pickle.UnpicklingError("an array has an unknown state")
        _, shape, kind, by_column, raw = state
        data = raw.encode("latin1") if isinstance(raw, str) else raw  # Python 2 wrote text
        if not isinstance(kind, PickledType) or not isinstance(data, bytes):
            raise pickle.UnpicklingError("an array holds other data than bytes")
        array = np.frombuffer(data, dtype=np.uint8)
        self.values = array.reshape(shape, order="F" if by_column else "C")


def _empty_array(kind: type, shape: object, code: object) -> PickledArray:
    """Return an empty array, as numpy's pickles start; its state fills it."""
    if kind is not PickledArray:
        raise pickle.UnpicklingError(f"unexpected array type {kind}")
    return PickledArray()


def _latin1(text: str, encoding: str) -> bytes:
    """Encode text to bytes, as Python 3's pickles of protocol 2 ask for."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"unexpected codec {encoding}")
    return text.encode("latin1")


def read_pickle(path: Path, archive: Archive = CIFAR100) -> dict[str, Any]:
    """Load a CIFAR file; its keys become text for Python 2 and 3 alike."""
    try:
        raw = read_file(path)
        _check_memo_size(raw)
        content = ArrayUnpickler(io.BytesIO(raw), encoding="latin1").load()
    except Exception as error:  # A damaged pickle may raise nearly anything.
        raise ValueError(
            f"{path} cannot be read as a {archive.name} file ({type(error).__name__}: {error}); "
            "unpack the archive again"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} must hold the dictionary of a {archive.name} file, got a "
            f"{type(content).__name__}"
        )
    return {_text(key): _array(value) for key, value in content.items()}


def _array(value: object) -> object:
    """Return the array of a stand-in; None if its state was missing."""
    return getattr(value, "values", None) if isinstance(value, PickledArray) else value


def _check_memo_size(raw: bytes) -> None:
    """Reject memo indices beyond the file's length: a few bytes could ask for endless memory."""
    for code, value, _ in pickletools.genops(raw):
        if code.name.endswith("PUT") and value is not None and int(value) > len(raw):
            raise pickle.UnpicklingError(f"memo index {value} exceeds the file's length")


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _class_names(path: Path, archive: Archive) -> tuple[str, ...]:
    content = read_pickle(path, archive)
    names = content.get(archive.names)
    if not isinstance(names, list | tuple) or not all(isinstance(n, str | bytes) for n in names):
        raise ValueError(
            f"{archive.names!r} in {path} must be a list of {archive.classes} texts, got "
            f"{format_value(names)}; unpack the archive again"
        )
    names = [nfc(_text(name)) for name in names]
    if len(set(names)) != archive.classes or len(names) != archive.classes:
        kind = "fine classes" if archive is CIFAR100 else "classes"
        raise ValueError(
            f"{path} has {len(names if len(set(names)) == archive.classes else set(names))} "
            f"{kind}; {archive.name} has {archive.classes}"
        )
    return tuple(names)


def check_images(path: Path, content: dict[str, Any]) -> NDArray[np.uint8]:
    """Return the pixels of a file, (N, 3072), after a check."""
    images = content.get("data")
    if (
        not isinstance(images, np.ndarray)
        or images.dtype != np.uint8
        or images.shape[1:] != (3 * SIDE * SIDE,)
        or not len(images)
    ):
        found = (
            f"{images.dtype} {images.shape}"
            if isinstance(images, np.ndarray)
            else type(images).__name__
        )
        raise ValueError(
            f"'data' in {path} must be a uint8 array (N, {3 * SIDE * SIDE}); found {found}"
        )
    return images


def check_labels(
    path: Path, content: dict[str, Any], count: int, archive: Archive = CIFAR100
) -> NDArray[np.int64]:
    """Return the labels of a file, (count,), after a check; CIFAR-100's fine ones."""
    labels = content.get(archive.labels)
    if labels is None:
        other = CIFAR10 if archive is CIFAR100 else CIFAR100
        hint = f" (these are {other.name}'s keys)" if other.labels in content else ""
        raise ValueError(f"{path} lacks {archive.labels!r}, found {sorted(content)}{hint}")
    if not isinstance(labels, list | tuple) and getattr(labels, "ndim", 0) != 1:
        raise ValueError(
            f"{archive.labels!r} in {path} must be a list of {count} integers, got "
            f"{format_value(labels)}"
        )
    if len(labels) != count:
        raise ValueError(
            f"{archive.labels!r} in {path} must be {count} integers, one per image; "
            f"found {len(labels)}"
        )
    labels = integer_list(f"{path}: {archive.labels}", labels)
    wrong = [row for row, label in enumerate(labels) if not 0 <= label < archive.classes]
    if wrong:
        raise ValueError(
            f"{len(wrong)} labels in {path} lie outside 0 to {archive.classes - 1}, "
            f"the first {format_value(labels[wrong[0]])} in row {wrong[0]}"
        )
    return np.array(labels, dtype=np.int64)
