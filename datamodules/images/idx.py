"""Fashion-MNIST from its published idx files, gzipped or not.

torchvision's reader takes unpacked files in a folder of its own layout alone.
"""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from datamodules.files.text_files import read_file
from datamodules.files.values import refuse
from datamodules.images.cifar100 import PixelRows
from datamodules.images.classification import ClassificationDataModule, Sample, make_sample
from datamodules.images.transforms import Augmentation, PaperAugmentation, Transform
from datamodules.loading.sampling import SeededDataset

SIDE, BORDER = 28, 2  # LeNet-5's border, with which images of 28 pixels have 32
UNSIGNED_BYTES = 8  # the third byte of an idx file
CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag",
    "Ankle boot",
)  # fmt: skip
FILES = {"train": "train", "val": "t10k"}


class FashionMNISTDataModule(ClassificationDataModule):
    """Fashion-MNIST: 28 x 28 grey pixels in a black border of 2, as RGB; its test set is ``val``.

    By default a tenth of the training images validates, so that the test set tests only; see
    ``selection_share``.

    Layout: ``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte``, ``t10k-images-idx3-ubyte`` and
    ``t10k-labels-idx1-ubyte``, each as it is or with ``.gz``.

    Source: Xiao et al., "Fashion-MNIST", 2017, https://arxiv.org/abs/1708.07747; Debian's package
    dataset-fashion-mnist has the files in /usr/share/datasets/fashion-mnist.

    Args:
        root: Folder of the files.
        augmentation: Makes the transforms; None means the papers' recipe, uncropped in evaluation.
        selection_share: See ``ClassificationDataModule``.
        **options: Options of ``ClassificationDataModule``.
    """

    kept_side = SIDE + 2 * BORDER
    class_names = CLASSES
    layout = (
        "{train,t10k}-images-idx3-ubyte and {train,t10k}-labels-idx1-ubyte, with or without .gz"
    )
    example = "data=fashion_mnist data.root=/usr/share/datasets/fashion-mnist"

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        augmentation: Augmentation | None = None,
        selection_share: float = 0.1,
        **options: Any,
    ) -> None:
        augmentation = augmentation or PaperAugmentation(crop_pct=1.0)
        super().__init__(
            root, augmentation=augmentation, selection_share=selection_share, **options
        )

    def build(self) -> dict[Any, SeededDataset]:
        """Read the files and check them."""
        make = self.augmentation
        transforms = {"train": make.train(self.image_size), "val": self._eval}
        return {
            split: self._split(FILES[split], transform) for split, transform in transforms.items()
        }

    def _split(self, name: str, transform: Transform) -> SeededDataset:
        path = self._find(f"{name}-images-idx3-ubyte")
        images, labels = read_idx(path), read_idx(self._find(f"{name}-labels-idx1-ubyte"))
        shape = (len(labels), SIDE, SIDE)
        rule = f"has an array of {images.shape}, expected {shape} for {len(labels)} labels"
        refuse(path, {rule: images.shape != shape or not len(labels)})
        wrong = np.flatnonzero(labels >= len(CLASSES))[:1].tolist()
        refuse(path, {f"has labels above {len(CLASSES) - 1} beside it, at": wrong})
        rows = GreyRows([path], [images], [labels.astype(np.int64)], transform)
        return self.seeded(rows, rows.path)

    def _find(self, name: str) -> Path:
        for file in (self.folder / name, self.folder / f"{name}.gz"):
            if file.is_file():
                return file
        raise FileNotFoundError(f"{self.folder} lacks {name} and {name}.gz; it needs {self.layout}")


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Read an array of bytes from an idx file, gzipped if its name ends so.

    Raises:
        ValueError: The file is damaged, or holds another type; it is named.
    """
    raw = read_file(path)
    if path.suffix == ".gz":
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path} cannot be unpacked ({error}); copy it again") from error
    head = raw[:4]
    valid = len(head) == 4 and tuple(head[:3]) == (0, 0, UNSIGNED_BYTES)
    refuse(path, {f"is not an idx file of bytes: it begins with {head.hex()}": not valid})
    start = 4 + 4 * head[3]
    shape = tuple(np.frombuffer(raw[4:start], ">u4").tolist())
    count = len(raw) - start
    rule = f"has {count:,} values for an array of {shape}; copy it again"
    refuse(path, {rule: len(shape) != head[3] or count != np.prod(shape, dtype=np.int64)})
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


class GreyRows(PixelRows):
    """Dataset of grey images (N, H, W) in memory."""

    def __getitem__(self, index: int, /) -> Sample:
        """Return ``image`` (3, H, W), ``label`` and ``sample_id``."""
        image = Image.fromarray(np.pad(self.images[index], BORDER)).convert("RGB")
        return make_sample(self.transform(image), int(self.labels[index]), index)
