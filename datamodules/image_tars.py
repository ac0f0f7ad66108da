"""ImageNet's classes in tar files, read in any order by timm's reader."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from timm.data.readers.reader_image_in_tar import ReaderImageInTar, TarState

from datamodules.classification import ClassificationDataModule, Sample, sample
from datamodules.files import decode_bytes, first_few, to_rgb
from datamodules.sampling import SeededDataset
from datamodules.transforms import Transform


class ImageTarsDataModule(ClassificationDataModule):
    """Images in tar files: ``train/*.tar`` or ``train.tar``, and the same of ``val``.

    The class of an image is its folder in the tar file, or, where it has none, the name of the tar
    file: ImageNet's own training archive, one tar file a class within or beside the others, serves
    as it is. Labels are the classes' places in the order of their names, as of class folders. timm
    keeps about a kilobyte an image in memory, and the list of a set above 10 GB beside it.

    Args:
        root: Folder that holds both.
        num_classes: Expected number of classes; None accepts any.
        **options: Of ``ClassificationDataModule``, such as ``image_size``.
    """

    layout = "train/*.tar or train.tar, val/*.tar or val.tar, with <class>/*.jpg in them"
    example = "data=imagenet_tar data.root=/data/imagenet-tar"

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        num_classes: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(root, **options)
        self.expected_classes = num_classes

    def build(self) -> dict[Any, SeededDataset]:
        """List what is in the tar files."""
        readers = {split: open_tars(self._place(split)) for split in ("train", "val")}
        self.class_names = tuple(sorted(readers["train"].class_name_to_idx))
        if self.expected_classes not in (None, len(self.class_names)):
            raise ValueError(
                f"{self._place('train')} has {len(self.class_names)} classes but data.num_classes "
                f"is {self.expected_classes}; correct one of them"
            )
        strays = sorted(set(readers["val"].class_name_to_idx) - set(self.class_names))
        if strays:
            raise ValueError(
                f"{self._place('val')} has classes that training lacks: {first_few(strays)}"
            )
        make = self.augmentation
        return {
            "train": self._split(readers["train"], make.train(self.image_size)),
            "val": self._split(readers["val"], make.eval(self.image_size)),
        }

    def _place(self, split: str) -> Path:
        for place in (self.folder / split, self.folder / f"{split}.tar"):
            if place.is_file() or (place.is_dir() and any(place.glob("*.tar"))):
                return place
        raise FileNotFoundError(
            f"{self.folder} has no tar files of {split}; it needs {self.layout}"
        )

    def _split(self, reader: ReaderImageInTar, transform: Transform) -> SeededDataset:
        label_of = {name: label for label, name in enumerate(self.class_names)}
        # timm sorts by the numbers in names, class folders are sorted as text.
        ours = np.array([label_of[name] for name in names_of(reader)])
        images = TarImages(reader, ours[np.asarray(reader.targets)], transform)
        return self.seeded(images, images.path)


class TarImages:
    """Images of timm's reader with labels.

    Args:
        reader: Opens the files where they are read first.
        labels: Of its images.
        transform: From RGB image to tensor.
    """

    def __init__(self, reader: ReaderImageInTar, labels: Any, transform: Transform) -> None:
        self.reader, self.labels, self.transform = reader, labels, transform
        self.process = os.getpid()

    def __len__(self) -> int:
        """Number of images."""
        return len(self.labels)

    def path(self, index: int) -> str:
        """The tar file of a sample and its place there."""
        member, parent, child = self.reader.samples[index]
        place = Path(self.reader.root, parent) if parent else Path(self.reader.root)
        return "/".join([str(place), *([child.name] if child is not None else []), member.name])

    def __getitem__(self, index: int, /) -> Sample:
        """Get ``image`` (3, H, W), ``label`` and ``sample_id``."""
        if self.process != os.getpid():
            # A loader process that went on with its parent's files would share their positions.
            close_all(self.reader)
            self.process = os.getpid()
        file, _ = self.reader[index]
        name = self.path(index)
        image = to_rgb(decode_bytes(file.read(), name), name)
        return sample(self.transform(image), int(self.labels[index]), index)


def open_tars(place: Path) -> ReaderImageInTar:
    """Timm's reader of a tar file, or of those of a folder.

    Raises:
        ValueError: No tar file, a damaged one, or no images.
    """
    try:
        return ReaderImageInTar(str(place))  # type: ignore[no-untyped-call]
    except (tarfile.TarError, EOFError) as error:
        raise ValueError(f"{place}: a tar file is damaged ({error}); copy it again") from error
    except ValueError as error:
        raise ValueError(f"{place}: no images in its tar files ({error})") from error


def names_of(reader: ReaderImageInTar) -> list[str]:
    """The classes in the order of the reader's own labels."""
    return [reader.class_idx_to_name[label] for label in range(len(reader.class_idx_to_name))]


def close_all(reader: ReaderImageInTar) -> None:
    """Forget open files, so that they are opened anew; what the parent opened stays open there."""
    states: list[TarState] = (
        [reader.tar_state] if reader.root_is_tar else list(reader.tar_state.values())
    )
    for state in states:
        for one in (state, *state.children.values()):
            one.reset()  # type: ignore[no-untyped-call]
