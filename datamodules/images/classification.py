"""Base of the classification datasets: batches of image, label and sample_id."""

from __future__ import annotations

import copy
import math
import os
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from datamodules.base import SPLITS, TEST_SPLIT, Split, check_minimum
from datamodules.files.bands import Bands, read_bands
from datamodules.files.console import log
from datamodules.files.decoding import load_rgb
from datamodules.files.values import check_option, refuse
from datamodules.images import band_transforms
from datamodules.images.base import ImageDataModule
from datamodules.images.batch_transforms import Squeezed, batch_augmentation
from datamodules.images.transforms import (
    ERASED,
    NOISE,
    Augmentation,
    PaperAugmentation,
    Prepared,
    Transform,
)
from datamodules.loading.memory import format_bytes
from datamodules.loading.pixels import erase, is_bytes, scale_bytes
from datamodules.loading.resident import ResidentDataset, check_room, read_entries
from datamodules.loading.sampling import EvalSampler, NamedDataset, SeededDataset, process_group

UNLABELLED = -1
SELECTION_SEED = 0  # of the draw that ``selection_share`` makes, the same in every run
REQUIRED = "required"  # for recipes: the command must pass token_labels
Boxes = Literal["image", "released"]  # see ``token_labels.LabelledTransform``
Sample = dict[str, Tensor | int]


class ImageFiles:
    """Dataset of image files with labels.

    Args:
        root: Folder that the names are relative to.
        names: File names.
        labels: Label per file.
        transform: Function from an image to a tensor.
        bands: Bands to read instead of 8-bit RGB.
    """

    def __init__(
        self,
        root: Path,
        names: Sequence[str],
        labels: Sequence[int],
        transform: Transform,
        bands: Bands | None = None,
    ) -> None:
        self.root, self.transform, self.bands = root, transform, bands
        # Arrays, because each worker would copy a list of a million strings page by page.
        self.names = np.array([os.fsencode(name) for name in names])
        self.labels = np.array(labels, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, indices: NDArray[np.int64]) -> Self:
        """Return the dataset of some of the files."""
        files = copy.copy(self)
        files.names, files.labels = self.names[indices], self.labels[indices]
        return files

    def path(self, index: int) -> str:
        """Return the file of a sample."""
        # os.path, because pathlib takes ten times as long, per image.
        return os.path.join(self.root, os.fsdecode(self.names[index]))  # noqa: PTH118

    def __getitem__(self, index: int, /) -> Sample:
        """Return ``image`` (C, H, W), ``label`` and ``sample_id``."""
        # Ignore EXIF, as timm and torchvision did for the published accuracies.
        path = self.path(index)
        image: Any = load_rgb(path, upright=False) if self.bands is None else None
        if self.bands is not None:
            image = read_bands(path, self.bands)
        return make_sample(self.transform(image), int(self.labels[index]), index)


class ClassificationDataModule(ImageDataModule):
    """Base of the classification datasets.

    Batches have ``image`` (B, C, image_size, image_size) and the int64 tensors (B,) ``label`` and
    ``sample_id``, the index in the dataset. Images of ``predict_path`` have label -1. Loaders give
    RGB images as bytes, with the rectangles to erase as ``erased`` and the seed of the noise in
    them; a trainer calls ``normalise`` on the device, and a loop of your own calls it itself.

    Args:
        root: Folder of the dataset.
        image_size: Side of the images in pixels.
        augmentation: Builds the transforms; None means the papers' ImageNet recipe.
        repeated_augmentation: Consecutive copies of each training image, augmented differently. An
            epoch then covers 1 / ``repeated_augmentation`` of the images. DeiT uses 3.
        batch_size: Samples per training batch and process.
        token_labels: Folder of label maps of the training images (see ``token_labels``) if
            ``takes_maps``; "required" raises an error that asks for the folder.
        token_boxes: Position of the crops in the label maps; see ``LabelledTransform``.
        resident: Decode all images once and keep them as bytes on the device, which augments them
            in batches; see ``batch_transforms``. Each process keeps all of them.
        selection_share: Share of each class's training images that validate in training, so that
            the validation images test only; 0: the same images validate and test.
        **options: Options of ``BaseDataModule``.

    Attributes:
        takes_maps: True if this layout supports label maps.
        kept_side: Side of the square images of this layout; None if they differ.
        expected_classes: Number of classes in ``data.num_classes``; None accepts any.
    """

    fixed_size = True
    takes_maps: ClassVar[bool] = False
    kept_side: ClassVar[int | None] = None
    expected_classes: int | None = None

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        image_size: int = 224,
        augmentation: Augmentation | None = None,
        repeated_augmentation: int = 1,
        batch_size: int = 128,
        token_labels: str | None = None,
        token_boxes: Boxes = "image",
        resident: bool = False,
        selection_share: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(root, batch_size=batch_size, **options)
        rule = "from 0 to below 1"
        self.selection_share = check_option(
            "selection_share", selection_share, 0 <= selection_share < 1, rule
        )
        is_alone = not selection_share or token_labels is None
        check_option("token_labels", token_labels, is_alone, "null with data.selection_share")
        self.token_labels = token_labels
        self.token_boxes: Boxes = token_boxes
        self.image_size = check_minimum("image_size", image_size, 1)
        self.repeated_augmentation = check_minimum(
            "repeated_augmentation", repeated_augmentation, 1
        )
        self.augmentation: Augmentation = augmentation or PaperAugmentation()
        self.resident = resident
        self._resident: dict[Split, ResidentDataset] = {}
        if resident:
            batch_augmentation(self.augmentation, image_size)  # refuses what takes single images
        is_alone = not resident or token_labels is None
        check_option("token_labels", token_labels, is_alone, "null with data.resident=true")
        self.check_memory((self.image_size, self.image_size), "data.image_size")

    @property
    def normalisation(self) -> tuple[Sequence[float], Sequence[float]]:
        """Mean and standard deviation per channel that normalise ``image``."""
        if self.bands is not None:
            statistics = self.known_statistics()
            return statistics.mean, statistics.std
        return self.augmentation.mean, self.augmentation.std

    def setup(self, stage: str | None = None) -> None:
        """Build the datasets; with ``selection_share`` divide the training images."""
        is_new = not self._datasets
        super().setup(stage)
        if is_new and self.selection_share:
            option = f"data.selection_share={self.selection_share}"
            test = self.dataset("val")
            self._datasets |= {**self._divided(self.selection_share, option), "test": test}
            val, train = (len(self.dataset(split)) for split in ("val", "train"))
            log(
                f"{val:,} of {val + train:,} training images validate ({option}); the "
                f"{len(test):,} others test only"
            )

    def divide(self) -> dict[Split, NamedDataset]:
        """Return the training images without a share of each class, and this share as validation.

        Raises:
            ValueError: The layout cannot divide its images, or a class has too few.
        """
        images: Any = self.dataset("train").dataset
        if not hasattr(images, "select") or hasattr(images, "flags"):  # of several labels
            return super().divide()
        return self._divided(self.held_out, f"held_out={self.held_out}")

    def _divided(self, share: float, option: str) -> dict[Split, NamedDataset]:
        """Return the training images in two parts, the second a share of each class."""
        images: Any = self.dataset("train").dataset
        rule = "is for images in files, CIFAR's and Fashion-MNIST, with one label each"
        refuse(option, {rule: not hasattr(images, "select")})
        is_val = draw_rows(images.labels, share)
        untrained = set(images.labels.tolist()) - set(images.labels[~is_val].tolist())
        class_names = [self.class_names[label] for label in untrained]
        refuse(option, {"leaves no training image of the classes": class_names})
        train, val = (images.select(np.flatnonzero(rows)) for rows in (~is_val, is_val))
        val.transform = self._eval
        return {"train": self.seeded(train, train.path), "val": self.seeded(val, val.path)}

    def test_dataloader(self) -> DataLoader[Any]:
        """Return the test batches: the validation images, unless ``selection_share`` draws some."""
        split: Split = "test" if "test" in self._datasets else "val"
        return self._eval_loader_of(self.loaded(split))

    def _to_predict(self) -> NamedDataset:
        splits: tuple[Split, ...] = ("predict", "test")
        return self.dataset(next((split for split in splits if split in self._datasets), "val"))

    def check_files(self, seconds: float = 60.0) -> None:
        """Check all files and the label maps before training; see ``BaseDataModule``.

        Raises:
            FileNotFoundError: A file does not exist.
            ValueError: A file is broken, or required label maps are missing or unsupported.
        """
        required = self.token_labels == REQUIRED
        unsupported = self.token_labels is not None and not self.takes_maps
        faults = {
            "trains with label maps: pass data.token_labels=<folder of label maps> (the authors' "
            "label_top5_train_nfnet, or the output of python tools/annotate.py), or "
            "data.token_labels=null to train every token with its image's label": required,
            "has label maps for image files in class folders only: pass data=imagenet, "
            "data=folder or data.token_labels=null": unsupported,
        }
        refuse("data.token_labels", faults)
        super().check_files(seconds)

    def check_count(self, source: Path, kind: str = "classes") -> None:
        """Raise an error if the number of classes differs from ``data.num_classes``.

        Raises:
            ValueError: The numbers differ.
        """
        count, expected = len(self.class_names), self.expected_classes
        rule = f"has {count} {kind} but data.num_classes is {expected}; correct it, or pass null"
        refuse(source, {f"{rule} to accept any number": expected not in (None, count)})

    def files(
        self, root: Path, names: Sequence[str], labels: Sequence[int], transform: Transform
    ) -> SeededDataset:
        """Return a seeded dataset of labelled image files."""
        images = ImageFiles(root, names, labels, transform, self.bands)
        return self.seeded(images, images.path)

    def class_counts(self) -> tuple[int, ...]:
        """Return the number of training images per class.

        Raises:
            ValueError: The layout leaves the labels open before the images are read.
        """
        labels = getattr(self.dataset("train").dataset, "labels", None)
        is_unknown = labels is None or getattr(self, "labels", None) is not None
        rule = "does not count its classes; pass task.loss.class_weights=[<a weight per class>]"
        refuse(type(self).__name__, {rule: is_unknown})
        counts = np.bincount(np.asarray(labels), minlength=self.num_classes)
        return tuple(counts.tolist())

    def plain(self, split: Split) -> DataLoader[Any]:
        """Return this process's share of a split, in order, with the evaluation transform."""
        dataset = self.plain_dataset(split)
        rank, world_size = process_group()
        sampler = EvalSampler(len(dataset), rank=rank, world_size=world_size)
        return self._loader(dataset, sampler, self.eval_batch_size, drop_last=False)

    def plain_dataset(self, split: Split) -> NamedDataset:
        """Return the dataset of a split with the evaluation transform."""
        seeded = self.dataset(split)
        images: Any = copy.copy(seeded.dataset)
        images.transform = self._eval
        return self.seeded(images, seeded.describe)

    def loaded(self, split: Split) -> NamedDataset:
        """Return the dataset of a split; with ``resident`` its images on the trainer's device."""
        source = self.dataset(split)
        if not self.resident:
            return source
        resident = self._resident.get(split)
        if resident is None or resident.dataset is not source.dataset:
            resident = self._resident[split] = self._read_resident(split, source)
        return resident

    def _read_resident(self, split: Split, source: NamedDataset) -> ResidentDataset:
        """Decode the images of a split onto the trainer's device."""
        device = torch.device("cpu")
        if self.trainer is not None:
            device = self.trainer.strategy.root_device
        sides: dict[Split, int] = {
            name: self.image_size for name in ("val", "test") if name in self._datasets
        }
        change = None
        if split == "train":
            change = batch_augmentation(self.augmentation, self.image_size)
            sides["train"] = change.stored_side(self.kept_side)
            images: Any = copy.copy(source.dataset)
            images.transform = Squeezed(sides["train"])
            source = self.seeded(images, source.describe)
        sizes = {name: 3 * side**2 * len(self.dataset(name)) for name, side in sides.items()}
        check_room(sum(sizes.values()), device)
        started = time.monotonic()
        loader = self._loader(
            source, EvalSampler(len(source)), self.eval_batch_size, drop_last=False
        )
        entries = read_entries(loader, len(source), device)
        log(
            f"{len(source):,} {(SPLITS | TEST_SPLIT)[split]} images lie on {device} as bytes of "
            f"{sides[split]}x{sides[split]} pixels ({format_bytes(sizes[split])}, decoded in "
            f"{time.monotonic() - started:.0f} s)"
        )
        return ResidentDataset(self.dataset(split), entries, self.seed, change)

    def train_transform(self) -> Any:
        """Return the transform of training images."""
        if self.bands is not None:
            statistics = self.known_statistics()
            return band_transforms.train_transform(self.augmentation, self.image_size, statistics)
        return self.augmentation.train(self.image_size)

    def normalise(self, batch: Any) -> Any:
        """Return a batch with normalised floats in place of bytes, its rectangles erased."""
        image = batch.get("image")
        if not is_bytes(image):
            return batch
        batch = {**batch, "image": scale_bytes(image, 255, *self.normalisation)}
        boxes, seed = batch.pop(ERASED, None), batch.pop(NOISE, None)
        if boxes is not None:
            batch["image"] = erase(batch["image"], boxes, seed)
        return batch

    def collate(self) -> Callable[[list[Any]], Any]:
        """Return the function that makes a batch of samples."""
        return collate

    def predict_sample(self, image: Any, name: str, index: int) -> Sample:
        """Return the sample of an image to predict, with the evaluation transform."""
        return make_sample(self._eval(image), UNLABELLED, index)

    @cached_property
    def _eval(self) -> Transform:
        if self.bands is not None:
            statistics = self.known_statistics()
            return band_transforms.eval_transform(self.augmentation, self.image_size, statistics)
        return self.augmentation.eval(self.image_size)


def draw_rows(labels: NDArray[np.int64], share: float) -> NDArray[np.bool_]:
    """Return True for a share of the images of each class, rounded up, the same in every run."""
    is_chosen = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        places = np.flatnonzero(labels == label)
        order = np.random.default_rng([SELECTION_SEED, label]).permutation(places)
        is_chosen[order[: math.ceil(share * len(places))]] = True
    return is_chosen


def collate(samples: list[Sample]) -> dict[str, Any]:
    """Return a batch, with one seed of its noise, which stays outside of devices."""
    batch: dict[str, Any] = default_collate(samples)
    return batch | ({NOISE: int(batch[NOISE].sum())} if NOISE in batch else {})


def make_sample(image: Tensor | Prepared, label: int, index: int) -> Sample:
    """Return a sample in the form of all classification datasets."""
    image, more = image if isinstance(image, Prepared) else (image, {})
    sample: Sample = {"image": image, "label": torch.tensor(label)}
    return sample | {"sample_id": torch.tensor(index)} | more
