"""What the classification sets share: labelled images in batches of image, label, sample_id."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from datamodules.base import Split, at_least
from datamodules.files import load_rgb
from datamodules.images.base import ImageDataModule
from datamodules.images.transforms import Augmentation, PaperAugmentation, Transform
from datamodules.loading.sampling import EvalSampler, SeededDataset, process_group

UNLABELLED = -1
REQUIRED = "required"  # a recipe's word for label maps that a command has to name
Boxes = Literal["image", "released"]  # see ``token_labels.LabelledTransform``
Sample = dict[str, Tensor | int]


class ImageFiles:
    """Image files with labels.

    Args:
        root: Folder that the names are relative to.
        names: File names.
        labels: Their labels.
        transform: From RGB image to tensor.
    """

    def __init__(
        self, root: Path, names: Sequence[str], labels: Sequence[int], transform: Transform
    ) -> None:
        self.root, self.transform = root, transform
        # Flat arrays: a million Python strings would be copied into each worker, page by page.
        self.names = np.array([os.fsencode(name) for name in names])
        self.labels = np.array(labels, dtype=np.int64)

    def __len__(self) -> int:
        """Number of images."""
        return len(self.labels)

    def path(self, index: int) -> str:
        """The file of a sample."""
        # Of each image: pathlib takes ten times as long.
        return os.path.join(self.root, os.fsdecode(self.names[index]))  # noqa: PTH118

    def __getitem__(self, index: int, /) -> Sample:
        """Get ``image`` (3, H, W), ``label`` and ``sample_id``."""
        # Unturned: timm and torchvision ignore EXIF, and so do the published accuracies.
        image = load_rgb(self.path(index), upright=False)
        return sample(self.transform(image), int(self.labels[index]), index)


class ClassificationDataModule(ImageDataModule):
    """Base of the classification sets; batches hold ``image``, ``label`` and ``sample_id``.

    ``image`` is (B, 3, image_size, image_size), normalised; ``label`` and ``sample_id``, the index
    in the dataset, are int64 (B,). Images of ``predict_path`` have label -1.

    Args:
        root: Folder of the dataset.
        image_size: Side of the images.
        augmentation: Makes the transforms; None means the ImageNet recipe of the papers.
        repeated_augmentation: How often a training image comes in a row, augmented anew each time;
            an epoch then sees this part of the images. DeiT has 3.
        batch_size: Samples per training batch and process.
        token_labels: Folder of label maps of the training images, see ``token_labels``, of data
            that ``takes_maps``; or "required", which a recipe says and a training refuses.
        token_boxes: Where crops lie in the label maps.
        **options: Of ``BaseDataModule``.
    """

    takes_maps: ClassVar[bool] = False

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
        **options: Any,
    ) -> None:
        super().__init__(root, batch_size=batch_size, **options)
        self.token_labels = token_labels
        if token_boxes not in get_args(Boxes):
            raise ValueError(
                f"data.token_boxes={token_boxes} must be one of {', '.join(get_args(Boxes))}"
            )
        self.token_boxes: Boxes = token_boxes
        self.image_size = at_least("image_size", image_size, 1)
        self.repeated_augmentation = at_least("repeated_augmentation", repeated_augmentation, 1)
        self.augmentation: Augmentation = augmentation or PaperAugmentation()
        self.check_memory((self.image_size, self.image_size), "data.image_size")

    @property
    def normalisation(self) -> tuple[Sequence[float], Sequence[float]]:
        """Mean and deviation that the channels of ``image`` are normalised by."""
        return self.augmentation.mean, self.augmentation.std

    def check_files(self, seconds: float = 60.0) -> None:
        """Look at all files before training does; see ``BaseDataModule``.

        Raises:
            FileNotFoundError: One does not exist.
            ValueError: One is broken, or there should be label maps and are none, or none can be.
        """
        if self.token_labels == REQUIRED:
            raise ValueError(
                "this recipe trains with token labels: pass data.token_labels=<folder of label "
                "maps> (the authors' label_top5_train_nfnet, or what python tools/annotate.py "
                "makes), or data.token_labels=null to give every token the label of its image"
            )
        if self.token_labels is not None and not self.takes_maps:
            raise ValueError(
                "label maps are of image files in class folders, as data=imagenet and data=folder "
                "read them; pass one of these, or data.token_labels=null"
            )
        super().check_files(seconds)

    def files(
        self, root: Path, names: Sequence[str], labels: Sequence[int], transform: Transform
    ) -> SeededDataset:
        """Labelled image files as a seeded dataset."""
        images = ImageFiles(root, names, labels, transform)
        return self.seeded(images, images.path)

    def plain(self, split: Split) -> DataLoader[Any]:
        """The images of a split prepared as in evaluation, in order, this process's share."""
        seeded = self.dataset(split)
        images: Any = copy.copy(seeded.dataset)
        images.transform = self._eval
        rank, world_size = process_group()
        sampler = EvalSampler(len(images), rank=rank, world_size=world_size)
        dataset = self.seeded(images, seeded.describe)
        return self._loader(dataset, sampler, self.eval_batch_size, drop_last=False)

    def unlabelled(self, image: Image.Image, name: str, index: int) -> Sample:
        """The sample of an image to predict, by the evaluation transform."""
        return sample(self._eval(image), UNLABELLED, index)

    @cached_property
    def _eval(self) -> Transform:
        return self.augmentation.eval(self.image_size)


def sample(image: Tensor, label: int, index: int) -> Sample:
    """A sample as all classification sets give it."""
    return {"image": image, "label": torch.tensor(label), "sample_id": torch.tensor(index)}
