"""Transforms of images for classification: equal to torchvision's and timm's."""

import random
from functools import partial

import lightning
import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform
from torch import nn
from torchvision import transforms

from datamodules import (
    ImageFolderDataModule,
    LightAugmentation,
    PaperAugmentation,
    SampleTransfer,
)
from datamodules.images.classification import collate, make_sample
from datamodules.images.transforms import NOISE, ToBytes
from datamodules.loading.pixels import erase, scale_bytes
from tasks.classification.task import ClassificationTask

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture
def image():
    pixels = np.random.default_rng(0).integers(0, 256, (90, 70, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.mark.parametrize("size", [(70, 90), (1, 1), (33, 2)])  # the first one has all 256 values
def test_normalised_as_by_torchvisions_two_steps(image, size):
    image = image.crop((0, 0, *size))
    theirs = transforms.Compose([transforms.ToTensor(), transforms.Normalize(MEAN, STD)])
    pixels = ToBytes()(image)
    assert pixels.dtype == torch.uint8
    assert pixels.is_contiguous()
    assert torch.equal(scale_bytes(pixels, 255, MEAN, STD), theirs(image))


def normalised(transform, image):
    """The image of a transform, with its rectangle set to 0."""
    data = ImageFolderDataModule(augmentation=LightAugmentation(mean=MEAN, std=STD))
    batch = collate([make_sample(transform(image), 0, 0)])
    batch.pop(NOISE, None)
    return data.normalise(batch)["image"][0]


def seeded(transform, image, seed):
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
    return transform(image)


@pytest.mark.parametrize("policy", ["rand-m9-mstd0.5-inc1", "augmix-m5-w4-d2", None])
def test_paper_images_equal_timms(image, policy):
    ours = PaperAugmentation(auto_augment=policy, random_erasing=0.7)
    theirs = create_transform(
        32, is_training=True, auto_augment=policy, color_jitter=0.4, re_prob=0.7, re_mode="const",
        interpolation="bicubic", mean=MEAN, std=STD,
    )  # fmt: skip
    made = []
    for transform in (partial(normalised, ours.train(32)), theirs):
        made.append(torch.stack([seeded(transform, image, seed) for seed in range(8)]))
    assert torch.equal(*made)
    evaluation = create_transform(32, interpolation="bicubic", crop_pct=0.9, mean=MEAN, std=STD)
    assert torch.equal(normalised(ours.eval(32), image), evaluation(image))


def test_light_images_equal_torchvisions(image):
    ours = LightAugmentation(random_erasing=0.7, flip=0.5)
    steps = ours.train(32).transforms[:-2]
    ends = [transforms.ToTensor(), transforms.Normalize(MEAN, STD), transforms.RandomErasing(0.7)]
    made = []
    for transform in (partial(normalised, ours.train(32)), transforms.Compose([*steps, *ends])):
        made.append(torch.stack([seeded(transform, image, seed) for seed in range(8)]))
    assert torch.equal(*made)


def test_erased_rectangles_hold_noise_of_their_own():
    images = torch.full((3, 3, 40, 50), 7.0)
    boxes = torch.tensor([[3, 5, 30, 40], [0, 0, 0, 0], [10, 0, 30, 50]])
    made = erase(images, boxes, 0)
    inside = torch.zeros(3, 1, 40, 50, dtype=torch.bool)
    inside[0, :, 3:33, 5:45], inside[2, :, 10:] = True, True
    assert torch.equal(made == 7, ~inside.expand_as(made))
    for noise in (made[0, :, 3:33, 5:45], made[2, :, 10:]):  # of 3,600 and 4,500 values
        assert abs(noise.mean()) < 0.06
        assert noise.std() == pytest.approx(1, abs=0.05)
        assert abs(torch.corrcoef(noise.flatten(1)) - torch.eye(3)).max() < 0.1  # per channel
    both = torch.stack([made[image, :, 10:33, 5:45].flatten() for image in (0, 2)])
    assert abs(torch.corrcoef(both)[0, 1]) < 0.07
    assert torch.equal(erase(images, boxes, 0), made)
    assert not torch.equal(erase(images, boxes, 1), made)
    assert torch.equal(erase(images, boxes, None), images.masked_fill(inside, 0))


class Recorder(lightning.LightningModule):
    """A user's module, without a hook of its own."""

    seen = ()

    def test_step(self, batch, batch_idx):
        self.seen = (*self.seen, batch)


@pytest.mark.parametrize(("precision", "dtype"), [("32-true", "float32"), ("64-true", "float64")])
def test_a_trainer_normalises_batches_for_any_module(sample_cache, precision, dtype):
    data = SampleTransfer(sample_cache, train_per_class=1, val_per_class=1, num_workers=0)
    module = Recorder()
    lightning.Trainer(
        accelerator="cpu", precision=precision, logger=False, enable_progress_bar=False,
        enable_model_summary=False, limit_test_batches=1,
    ).test(module, data)  # fmt: skip
    bytes_ = next(iter(data.test_dataloader()))
    (batch,) = module.seen
    assert bytes_["image"].dtype == torch.uint8
    assert batch["image"].dtype == getattr(torch, dtype)
    assert torch.equal(batch["image"].float(), data.normalise(bytes_)["image"])


def test_bytes_without_a_datamodule_are_refused(sample_cache):
    data = SampleTransfer(sample_cache, train_per_class=1, val_per_class=1, num_workers=0)
    data.setup()
    task = ClassificationTask(nn.Linear(1, 1), data.class_names)
    trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    with pytest.raises(ValueError, match="gives images as bytes, which a datamodule normalises"):
        trainer.test(task, data.val_dataloader())
