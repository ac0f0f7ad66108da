"""CIFAR-10 and CIFAR-100 from their original Python pickles, read without executing their code.

torchvision's readers take the published bytes alone, by their checksums, and so cannot read the
sample set or another one in this layout.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from datamodules.base import Split
from datamodules.files.text_files import nfc, read_file
from datamodules.files.values import format_value, integer_list, refuse
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
        return self.seeded(rows, rows.path)


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
        self.rows: NDArray[np.int64] = np.arange(len(self.labels))  # in the files
        self.ends = np.cumsum([len(rows) for rows in labels])

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, indices: NDArray[np.int64]) -> Self:
        """Return the dataset of some of the rows."""
        part = copy.copy(self)
        part.rows = self.rows[indices]
        part.images, part.labels = self.images[indices], self.labels[indices]
        return part

    def path(self, index: int) -> str:
        """Return the file and row of a sample, for error messages."""
        index = int(self.rows[index])
        file = int(np.searchsorted(self.ends, index, side="right"))
        first = int(self.ends[file - 1]) if file else 0
        return f"{self.paths[file]}, row {index - first}"

    def __getitem__(self, index: int, /) -> Sample:
        """Return ``image`` (3, H, W), ``label`` and ``sample_id``."""
        pixels = self.images[index].reshape(3, SIDE, SIDE).transpose(1, 2, 0)
        image = Image.fromarray(np.ascontiguousarray(pixels))
        return make_sample(self.transform(image), int(self.labels[index]), index)


class ArrayUnpickler(pickle._Unpickler):
    """Unpickler of containers, numbers, texts and byte arrays; other names raise an error.

    Python's own class keeps its memo in a dictionary: pickle's faster one allocates as much as a
    file asks for.
    """

    def find_class(self, module: str, name: str) -> Any:
        """Return a stand-in for one of the few names that pickled numpy arrays need."""
        return STAND_INS[f"{module}.{name}"]


class PickledType:
    """Stand-in for numpy's dtype, which would accept any state from a file."""

    state: object = None

    def __init__(self, *code: object) -> None:
        self.code = code[0]

    def __setstate__(self, state: object) -> None:
        """Keep the state, which is redundant for a plain type."""
        self.state = state

    @property
    def is_bytes(self) -> bool:
        """True for uint8 without fields."""
        is_plain = isinstance(self.state, tuple) and self.state[2:] == (None, None, None, -1, -1, 0)
        return self.code in ("u1", b"u1", "|u1", b"|u1") and (self.state is None or is_plain)


class PickledArray:
    """Stand-in for numpy's array while a file is read.

    Attributes:
        values: The array; set by its state.
    """

    values: NDArray[np.uint8] | None = None

    def __setstate__(self, state: Any) -> None:
        """Build the array from its state."""
        _, shape, kind, by_column, raw = state
        data = raw.encode("latin1") if isinstance(raw, str) else raw  # Python 2 wrote text
        if not isinstance(kind, PickledType) or not kind.is_bytes or not isinstance(data, bytes):
            raise pickle.UnpicklingError("an array holds other data than plain uint8")
        array = np.frombuffer(data, dtype=np.uint8)
        self.values = array.reshape(shape, order="F" if by_column else "C")


STAND_INS: dict[str, Callable[..., Any]] = {
    "numpy.ndarray": PickledArray,
    "numpy.dtype": PickledType,
    "numpy.core.multiarray._reconstruct": lambda *_: PickledArray(),
    "numpy._core.multiarray._reconstruct": lambda *_: PickledArray(),
    "_codecs.encode": lambda text, _: text.encode("latin1"),
}


def read_pickle(path: Path, archive: Archive = CIFAR100) -> dict[str, Any]:
    """Load a CIFAR file; its keys become text for Python 2 and 3 alike."""
    try:
        content = ArrayUnpickler(io.BytesIO(read_file(path)), encoding="latin1").load()
        return {_text(key): getattr(value, "values", value) for key, value in content.items()}
    except Exception as error:  # A damaged pickle may raise nearly anything.
        raise ValueError(
            f"{path} cannot be read as a {archive.name} file ({type(error).__name__}: "
            f"{error!s:.200}); unpack the archive again"
        ) from error


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _class_names(path: Path, archive: Archive) -> tuple[str, ...]:
    content = read_pickle(path, archive)
    names = content.get(archive.names)
    texts = isinstance(names, list | tuple) and all(isinstance(n, str | bytes) for n in names)
    names = [nfc(_text(name)) for name in names] if texts else []  # type: ignore[union-attr]
    distinct = len(set(names)) == len(names) == archive.classes
    rule = f"must be a list of {archive.classes} different texts"
    got = f"got {format_value(content.get(archive.names))}; unpack the archive again"
    refuse(path, {f"{archive.names!r} {rule}, {got}": not distinct})
    return tuple(names)


def check_images(path: Path, content: dict[str, Any]) -> NDArray[np.uint8]:
    """Return the pixels of a file, (N, 3072), after a check."""
    images, shape = content.get("data"), (3 * SIDE * SIDE,)
    valid = isinstance(images, np.ndarray) and images.shape[1:] == shape and len(images)
    rule = f"'data' must be a uint8 array (N, {shape[0]}), got {format_value(images)}"
    refuse(f"{path}:", {rule: not valid})
    return images  # type: ignore[return-value]


def check_labels(
    path: Path, content: dict[str, Any], count: int, archive: Archive = CIFAR100
) -> NDArray[np.int64]:
    """Return the labels of a file, (count,), after a check; CIFAR-100's fine ones."""
    second = CIFAR10 if archive is CIFAR100 else CIFAR100
    hint = f" (these are {second.name}'s keys)" if second.labels in content else ""
    lack = f"lacks {archive.labels!r}, found {sorted(content)}{hint}"
    refuse(path, {lack: archive.labels not in content})
    labels = content[archive.labels]
    numbers: tuple[int, ...] = ()
    if isinstance(labels, list | tuple) or getattr(labels, "ndim", 0) == 1:
        numbers = integer_list(f"{path}: {archive.labels}", labels)
    wrong = [row for row, label in enumerate(numbers) if not 0 <= label < archive.classes]
    rule = f"must be {count} integers from 0 to {archive.classes - 1}, one per image"
    got = f"{len(wrong)} others, the first in row {wrong[0]}" if wrong else format_value(labels)
    invalid = len(numbers) != count or bool(wrong)
    refuse(f"{path}: {archive.labels!r}", {f"{rule}, got {got}": invalid})
    return np.array(numbers, dtype=np.int64)
