"""CIFAR-10 and CIFAR-100 from their original Python pickles, read without running code in them."""

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
from datamodules.files.text_files import nfc, read_raw
from datamodules.files.whole_numbers import shown, whole_list
from datamodules.images.classification import ClassificationDataModule, Sample, sample
from datamodules.images.transforms import Augmentation, PaperAugmentation, Transform
from datamodules.loading.sampling import SeededDataset

SIDE = 32


@dataclass(frozen=True)
class Archive:
    """What the files of one of the two sets are called, and what is in them.

    Attributes:
        name: Of the set.
        folder: That the archive unpacks to.
        train: Files of the training set.
        test: File of the test set.
        meta: File of the classes' names.
        labels: Key of the labels.
        names: Key of the names in ``meta``.
        classes: How many there are.
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
    """The 100 fine classes of CIFAR-100, enlarged to ``image_size``; its test set is ``val``.

    Args:
        root: The unpacked folder of the archive or the folder that holds it.
        augmentation: Makes the transforms; None means the papers' recipe, uncropped in evaluation.
        **options: Of ``ClassificationDataModule``; ``image_size`` is the side to enlarge to.
    """

    archive: ClassVar[Archive] = CIFAR100
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

    def notices(self, looked: Mapping[Split, int]) -> list[str]:
        """Classes that no test image has."""
        rows = cast("PixelRows", self.dataset("val").dataset)
        absent = sorted(set(range(self.num_classes)) - set(rows.labels.tolist()))
        return super().notices(looked) + self.absent_notice(absent)

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
    """CIFAR-10, enlarged to ``image_size``; its test set is ``val``.

    Args:
        root: The unpacked folder of the archive or the folder that holds it.
        **options: Of ``CIFAR100DataModule``.
    """

    archive = CIFAR10
    layout = "cifar-10-batches-py/data_batch_1 to data_batch_5, test_batch and batches.meta"
    example = "data=cifar10 data.root=/data/cifar10"

    def build(self) -> dict[Any, SeededDataset]:
        """Read the seven files and check them."""
        return super().build()


class PixelRows:
    """Images in memory.

    Args:
        paths: The files that they come from.
        images: Of each file, (N, 3072) pixels, channel by channel, row by row.
        labels: Of each file, (N,) classes.
        transform: From RGB image to tensor.
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
        """Number of images."""
        return len(self.labels)

    def describe(self, index: int) -> str:
        """The place of a sample, for error messages."""
        file = int(np.searchsorted(self.ends, index, side="right"))
        first = int(self.ends[file - 1]) if file else 0
        return f"{self.paths[file]}, row {index - first}"

    def __getitem__(self, index: int, /) -> Sample:
        """Get ``image`` (3, H, W), ``label`` and ``sample_id``."""
        pixels = self.images[index].reshape(3, SIDE, SIDE).transpose(1, 2, 0)
        image = Image.fromarray(np.ascontiguousarray(pixels))
        return sample(self.transform(image), int(self.labels[index]), index)


class ArrayUnpickler(pickle.Unpickler):
    """Loads containers, numbers, texts and arrays of bytes; refuses to name anything else."""

    def find_class(self, module: str, name: str) -> Any:
        """Look up one of the few names that numpy arrays need, of which none is numpy's own."""
        if (module, name) == ("numpy", "ndarray"):
            return PickledArray
        if (module, name) == ("numpy", "dtype"):
            return PickledType
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return _empty_array
        if (module, name) == ("_codecs", "encode"):
            return _latin1
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no CIFAR file needs")


class PickledType:
    """Stands for numpy's dtype while a file is read: numpy believes any state it is given."""

    def __init__(self, code: bytes | str, *flags: object) -> None:
        name = code.decode("latin1") if isinstance(code, bytes) else code
        if name not in ("u1", "|u1"):
            raise pickle.UnpicklingError(f"it asks for an array of {name!r}; CIFAR's hold bytes")

    def __setstate__(self, state: object) -> None:
        """Take the state of a plain type, which says nothing new."""
        if not isinstance(state, tuple) or state[2:] != (None, None, None, -1, -1, 0):
            raise pickle.UnpicklingError(f"it asks for an array type of parts: {state!r:.80}")


class PickledArray:
    """Stands for numpy's array while a file is read.

    Attributes:
        values: The array, once its state is known.
    """

    values: NDArray[np.uint8]

    def __setstate__(self, state: Any) -> None:
        """Make the array, of as many bytes as there are."""
        if not isinstance(state, tuple) or len(state) != 5:
            raise pickle.UnpicklingError("it asks for an array of an unknown state")
        _, shape, kind, by_column, raw = state
        data = raw.encode("latin1") if isinstance(raw, str) else raw  # text where Python 2 wrote it
        if not isinstance(kind, PickledType) or not isinstance(data, bytes):
            raise pickle.UnpicklingError("it asks for an array of something else than bytes")
        array = np.frombuffer(data, dtype=np.uint8)
        self.values = array.reshape(shape, order="F" if by_column else "C")


def _empty_array(kind: type, shape: object, code: object) -> PickledArray:
    """What numpy's pickles start from: an empty array, filled by its state afterwards."""
    if kind is not PickledArray:
        raise pickle.UnpicklingError(f"it asks for an array of type {kind}")
    return PickledArray()


def _latin1(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes into old pickles."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it asks for the codec {encoding}")
    return text.encode("latin1")


def read_pickle(path: Path, archive: Archive = CIFAR100) -> dict[str, Any]:
    """Load a CIFAR file; its keys become text, whichever Python wrote them."""
    try:
        raw = read_raw(path)
        _refuse_far_memory(raw)
        content = ArrayUnpickler(io.BytesIO(raw), encoding="latin1").load()
    except Exception as error:  # A damaged pickle may raise nearly anything.
        raise ValueError(
            f"{path} cannot be read as a {archive.name} file ({type(error).__name__}: {error}); "
            "unpack the archive again"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} holds a {type(content).__name__}, not the dictionary of a {archive.name} file"
        )
    return {_text(key): _array(value) for key, value in content.items()}


def _array(value: object) -> object:
    """Return the array that was read in its stead; None for one that never got its state."""
    return getattr(value, "values", None) if isinstance(value, PickledArray) else value


def _refuse_far_memory(raw: bytes) -> None:
    """A few bytes can ask for a list of results that no machine has the memory for."""
    for code, value, _ in pickletools.genops(raw):
        if code.name.endswith("PUT") and value is not None and int(value) > len(raw):
            raise pickle.UnpicklingError(f"it asks for a memory of {value} results")


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _class_names(path: Path, archive: Archive) -> tuple[str, ...]:
    content = read_pickle(path, archive)
    names = content.get(archive.names)
    if not isinstance(names, list | tuple) or not all(isinstance(n, str | bytes) for n in names):
        raise ValueError(
            f"{archive.names!r} in {path} must be a list of {archive.classes} texts, got "
            f"{shown(names)}; unpack the archive again"
        )
    names = [nfc(_text(name)) for name in names]
    if len(set(names)) != archive.classes or len(names) != archive.classes:
        kind = "fine classes" if archive is CIFAR100 else "classes"
        raise ValueError(
            f"{path} names {len(names if len(set(names)) == archive.classes else set(names))} "
            f"{kind}; {archive.name} has {archive.classes}"
        )
    return tuple(names)


def check_images(path: Path, content: dict[str, Any]) -> NDArray[np.uint8]:
    """The pixels of a file, (N, 3072)."""
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
    """The labels of a file, (count,); of CIFAR-100 the fine ones."""
    labels = content.get(archive.labels)
    if labels is None:
        other = CIFAR10 if archive is CIFAR100 else CIFAR100
        hint = f" (these are {other.name}'s keys)" if other.labels in content else ""
        raise ValueError(f"{path} has no {archive.labels!r} but {sorted(content)}{hint}")
    if not isinstance(labels, list | tuple) and getattr(labels, "ndim", 0) != 1:
        raise ValueError(
            f"{archive.labels!r} in {path} must be a list of {count} integers, got {shown(labels)}"
        )
    if len(labels) != count:
        raise ValueError(
            f"{archive.labels!r} in {path} must be {count} integers, one per image; "
            f"found {len(labels)}"
        )
    labels = whole_list(f"{path}: {archive.labels}", labels)
    wrong = [row for row, label in enumerate(labels) if not 0 <= label < archive.classes]
    if wrong:
        raise ValueError(
            f"{len(wrong)} labels in {path} lie outside 0 to {archive.classes - 1}, "
            f"the first {shown(labels[wrong[0]])} in row {wrong[0]}"
        )
    return np.array(labels, dtype=np.int64)
