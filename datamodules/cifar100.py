"""CIFAR-100 from its original Python pickles, read without running any code in them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from datamodules.classification import ClassificationDataModule, Sample, sample
from datamodules.sampling import SeededDataset
from datamodules.transforms import Augmentation, PaperAugmentation, Transform

NUM_CLASSES = 100
SIDE = 32
ARCHIVE_FOLDER = "cifar-100-python"
FILES = ("train", "test", "meta")


class CIFAR100DataModule(ClassificationDataModule):
    """The 100 fine classes of CIFAR-100, enlarged to ``image_size``; its test set is ``val``.

    Args:
        root: The unpacked folder ``cifar-100-python`` or the folder that holds it.
        augmentation: Makes the transforms; None means the papers' recipe, uncropped in evaluation.
        **options: Of ``ClassificationDataModule``; ``image_size`` is the side to enlarge to.
    """

    layout = f"{ARCHIVE_FOLDER}/train, test and meta"
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
        """Read the three files and check them."""
        folder = self._archive()
        self.class_names = _class_names(folder / "meta")
        make = self.augmentation
        return {
            "train": self._split(folder / "train", make.train(self.image_size)),
            "val": self._split(folder / "test", make.eval(self.image_size)),
        }

    def _archive(self) -> Path:
        for folder in (self.folder / ARCHIVE_FOLDER, self.folder):
            if all((folder / name).is_file() for name in FILES):
                return folder
        packed = list(self.folder.glob("cifar-100-python*.tar.gz"))
        remedy = (
            f"unpack it: tar -xzf {packed[0]} -C {self.folder}"
            if packed
            else "pass the unpacked folder"
        )
        raise FileNotFoundError(f"{self.folder} lacks {self.layout}; {remedy}")

    def _split(self, path: Path, transform: Transform) -> SeededDataset:
        content = read_pickle(path)
        images = check_images(path, content)
        labels = check_labels(path, content, len(images))
        rows = PixelRows(path, images, labels, transform)
        return self.seeded(rows, rows.describe)


class PixelRows:
    """Images in memory.

    Args:
        path: The file that they come from.
        images: (N, 3072) pixels, channel by channel, row by row.
        labels: (N,) classes.
        transform: From RGB image to tensor.
    """

    def __init__(
        self,
        path: Path,
        images: NDArray[np.uint8],
        labels: NDArray[np.int64],
        transform: Transform,
    ) -> None:
        self.path, self.transform = path, transform
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        """Number of images."""
        return len(self.labels)

    def describe(self, index: int) -> str:
        """The place of a sample, for error messages."""
        return f"{self.path}, row {index}"

    def __getitem__(self, index: int, /) -> Sample:
        """Get ``image`` (3, H, W), ``label`` and ``sample_id``."""
        pixels = self.images[index].reshape(3, SIDE, SIDE).transpose(1, 2, 0)
        image = Image.fromarray(np.ascontiguousarray(pixels))
        return sample(self.transform(image), int(self.labels[index]), index)


class ArrayUnpickler(pickle.Unpickler):
    """Loads containers, numbers, texts and numpy arrays; refuses to name anything else."""

    def find_class(self, module: str, name: str) -> Any:
        """Look up one of the few names that numpy arrays need."""
        if (module, name) == ("numpy", "ndarray"):
            return np.ndarray
        if (module, name) == ("numpy", "dtype"):
            return np.dtype
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return _empty_array
        if (module, name) == ("_codecs", "encode"):
            return _latin1
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no CIFAR file needs")


def _empty_array(kind: type, shape: tuple[int, ...], code: bytes | str) -> NDArray[Any]:
    """What numpy's pickles start from: an empty array, filled by its state afterwards."""
    if kind is not np.ndarray:
        raise pickle.UnpicklingError(f"it asks for an array of type {kind}")
    return np.ndarray(shape, dtype=np.dtype(code.decode() if isinstance(code, bytes) else code))


def _latin1(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes into old pickles."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it asks for the codec {encoding}")
    return text.encode("latin1")


def read_pickle(path: Path) -> dict[str, Any]:
    """Load a CIFAR file; its keys become text, whichever Python wrote them."""
    try:
        with path.open("rb") as file:
            content = ArrayUnpickler(file, encoding="latin1").load()
    except Exception as error:  # A damaged pickle may raise nearly anything.
        raise ValueError(
            f"{path} cannot be read as a CIFAR-100 file ({type(error).__name__}: {error}); "
            "unpack the archive again"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} holds a {type(content).__name__}, not the dictionary of a CIFAR-100 file"
        )
    return {_text(key): value for key, value in content.items()}


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _class_names(path: Path) -> tuple[str, ...]:
    names = [_text(name) for name in read_pickle(path).get("fine_label_names", [])]
    if len(set(names)) != NUM_CLASSES:
        raise ValueError(
            f"{path} names {len(set(names))} fine classes; CIFAR-100 has {NUM_CLASSES}"
        )
    return tuple(names)


def check_images(path: Path, content: dict[str, Any]) -> NDArray[np.uint8]:
    """The pixels of a file, (N, 3072)."""
    images = content.get("data")
    if (
        not isinstance(images, np.ndarray)
        or images.dtype != np.uint8
        or images.shape[1:] != (3 * SIDE * SIDE,)
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


def check_labels(path: Path, content: dict[str, Any], count: int) -> NDArray[np.int64]:
    """The fine labels of a file, (count,)."""
    labels = content.get("fine_labels")
    if labels is None:
        hint = " (these are CIFAR-10's keys)" if "labels" in content else ""
        raise ValueError(f"{path} has no 'fine_labels' but {sorted(content)}{hint}")
    if len(labels) != count or not all(isinstance(label, int) for label in labels):
        raise ValueError(
            f"'fine_labels' in {path} must be {count} integers, one per image; found {len(labels)}"
        )
    wrong = [row for row, label in enumerate(labels) if not 0 <= label < NUM_CLASSES]
    if wrong:
        raise ValueError(
            f"{len(wrong)} labels in {path} lie outside 0 to {NUM_CLASSES - 1}, "
            f"the first {labels[wrong[0]]} in row {wrong[0]}"
        )
    return np.array(labels, dtype=np.int64)
