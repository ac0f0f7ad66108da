"""Training images that validate in training, so that the others test only."""

import numpy as np
import pytest
import torch

from datamodules import (
    CIFAR10DataModule,
    ElpvDataModule,
    FashionMNISTDataModule,
    ImageFolderDataModule,
    PaperAugmentation,
)
from datamodules.images.classification import draw_rows
from tests.errors import refuses
from tests.stand_ins import (
    write_cifar10,
    write_classes,
    write_elpv,
    write_fashion_mnist,
)

OPTIONS = {"image_size": 32, "batch_size": 4, "num_workers": 0}


def folders(root):
    for split, copies in (("train", 6), ("val", 2)):
        write_classes(root / split, ("cat", "dog"), copies)


LAYOUTS = {
    "cifar10": (write_cifar10, CIFAR10DataModule),
    "folders": (folders, ImageFolderDataModule),
    "fashion_mnist": (write_fashion_mnist, FashionMNISTDataModule),
    "elpv": (write_elpv, ElpvDataModule),
}


def names(data, split):
    dataset = data.dataset(split)
    return [dataset.describe(index) for index in range(len(dataset))]


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_share_of_the_training_images_validates(layout, resident, tmp_path):
    write, kind = LAYOUTS[layout]
    write(tmp_path)
    made = PaperAugmentation(auto_augment=None, crop_pct=1.0)
    whole = kind(tmp_path, selection_share=0.0, augmentation=made, **OPTIONS)
    data = kind(tmp_path, selection_share=0.3, augmentation=made, resident=resident, **OPTIONS)
    for one in (whole, data):
        one.setup()
    parts = [names(data, split) for split in ("train", "val", "test")]
    assert sorted([*parts[0], *parts[1]]) == sorted(names(whole, "train"))
    assert parts[2] == names(whole, "val")
    labels = data.dataset("val").dataset.labels
    assert set(labels) == set(whole.dataset("train").dataset.labels)
    for batch, other in zip(data.test_dataloader(), whole.test_dataloader(), strict=True):
        torch.testing.assert_close(batch["image"], other["image"], rtol=0, atol=0)
    batches = list(data.val_dataloader())
    assert torch.cat([batch["sample_id"] for batch in batches]).tolist() == [*range(len(parts[1]))]
    assert torch.cat([batch["label"] for batch in batches]).tolist() == labels.tolist()
    place = names(whole, "train").index(parts[1][0])
    whole.dataset("train").dataset.transform = whole._eval
    expected = whole.dataset("train")[0, place]["image"]
    torch.testing.assert_close(batches[0]["image"][0], expected, rtol=0, atol=0)
    assert {*next(iter(data.train_dataloader()))["sample_id"].tolist()} <= {*range(len(parts[0]))}
    assert data.predict_names() == parts[2]
    assert sum(data.class_counts()) == len(parts[0])


def test_the_draw_is_stratified_and_is_the_same_in_every_run():
    labels = np.repeat([0, 1, 2], [100, 50, 3])
    drawn = draw_rows(labels, 0.1)
    assert np.bincount(labels[drawn]).tolist() == [10, 5, 1]
    assert (drawn == draw_rows(labels, 0.1)).all()


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_a_share_is_from_0_to_below_1(share):
    refuses(
        "selection_share must be from 0 to below 1, got",
        ImageFolderDataModule,
        selection_share=share,
    )


def test_classes_keep_images_to_train_with(tmp_path):
    for split in ("train", "val"):
        write_classes(tmp_path / split, ("cat", "dog"))
    data = ImageFolderDataModule(tmp_path, selection_share=0.1, **OPTIONS)
    refuses("selection_share=0.1 leaves no training image of the classes.* cat", data.setup)
