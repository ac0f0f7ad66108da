"""Images that lie on the device: augmented in batches, each by its own draws, like single ones."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats
from timm.data.transforms import RandomResizedCropAndInterpolation
from torchvision.transforms import InterpolationMode, functional

from datamodules import (
    CIFAR100DataModule,
    ImageFolderDataModule,
    LightAugmentation,
    PaperAugmentation,
    SampleTransfer,
)
from datamodules.images import batch_transforms as batches
from datamodules.images.batch_transforms import ORDERS, SIDES, batch_augmentation
from datamodules.images.classification import collate, make_sample
from datamodules.images.transforms import ERASED, MeanRectangle, NoiseRectangle
from datamodules.loading import resident
from datamodules.loading.resident import Draws
from tests.errors import refuses

COUNT = 4000
PAPER = PaperAugmentation(auto_augment=None, random_erasing=0.5)
LIGHT = LightAugmentation(flip=0.5, random_erasing=0.5)
CROPS = LightAugmentation(shift=0.125, degrees=0, scale=(1, 1), color_jitter=0, flip=0.5)


def draws(count=COUNT, epoch=0, seed=0):
    return Draws(seed, [(epoch, index) for index in range(count)])


@pytest.fixture(scope="module")
def picture():
    """A smooth image of 24 pixels with some noise."""
    rng = np.random.default_rng(0)
    blocks = np.kron(rng.integers(0, 200, (3, 6, 6)), np.ones((1, 4, 4)))
    return torch.from_numpy((blocks + rng.integers(0, 55, (3, 24, 24))).astype(np.uint8))


def test_draws_are_uniform_and_independent():
    numbers = draws().uniform(count=6)
    assert stats.kstest(numbers.ravel(), "uniform").pvalue > 0.01
    others = [draws(epoch=1).uniform(count=6), draws(seed=1).uniform(count=6), numbers[1:]]
    columns = [*numbers.T, *(part.T[0] for part in others[:2]), np.append(others[2][:, 0], 0.5)]
    correlated = np.corrcoef(columns) - np.eye(len(columns))
    assert abs(correlated).max() < 4 / COUNT**0.5
    flips = draws().chance(0.3)
    pairs = flips[:-1] & flips[1:]
    assert abs(flips.mean() - 0.3) < 4 * (0.21 / COUNT) ** 0.5
    assert abs(pairs.mean() - 0.09) < 4 * (0.09 / COUNT) ** 0.5
    assert stats.chisquare(np.bincount(draws().below(7), minlength=7)).pvalue > 0.01
    some = Draws(0, [(0, 9), (0, 4)]).uniform(count=6)
    assert np.array_equal(some, numbers[[9, 4]])  # whatever else is in the batch


def same_distribution(ours, theirs):
    for one, other in zip(ours.T, theirs.T, strict=True):
        assert stats.ks_2samp(one, other).pvalue > 0.01


@pytest.mark.parametrize("sides", [(32, 32), (60, 20)])  # in the second many crops do not fit
def test_crops_are_distributed_as_timms(sides):
    random.seed(0)
    image = Image.new("RGB", sides[::-1])
    shares, ratios = (0.3, 1.0), (0.75, 4 / 3)
    crop = RandomResizedCropAndInterpolation.get_params
    theirs = np.array([crop(image, shares, ratios) for _ in range(COUNT)])
    ours = batches.draw_crops(draws(), np.array([sides] * COUNT), shares, ratios)
    same_distribution(ours, theirs)
    same_distribution(ours[:, 2:] / ours[:, :1:-1], theirs[:, 2:] / theirs[:, :1:-1])


@pytest.mark.parametrize("kind", [NoiseRectangle, MeanRectangle])
def test_erased_rectangles_are_distributed_as_single_ones(kind):
    random.seed(0), torch.manual_seed(0)
    single, image = kind(0.6), torch.empty(3, 20, 32)
    theirs = np.array([single(image).more[ERASED].tolist() for _ in range(COUNT)])
    sides = np.array([(20, 32)] * COUNT)
    ours = draws()
    happens = ours.chance(0.6)
    ours = batches.draw_boxes(ours, sides, kind.shares, kind.ratios, smaller=True)
    same_distribution(ours * happens[:, None], theirs)


def test_crops_and_colours_equal_pillows(picture):
    rng, count = np.random.default_rng(1), 24
    images, pil = picture.repeat(count, 1, 1, 1), functional.to_pil_image(picture)
    sides = rng.integers(3, 25, (count, 2))
    boxes = np.concatenate([rng.integers(0, 25 - sides), sides], 1)
    bicubic, flipped = (torch.from_numpy(rng.random(count) < 0.5) for _ in range(2))
    made = batches.resized_crops(images, 30, torch.from_numpy(boxes).float(), bicubic, flipped)
    turns, scales = rng.uniform(-20, 20, count), rng.uniform(0.8, 1.2, count)
    corners = rng.integers(0, 9, (count, 2))
    turn = torch.from_numpy(np.radians(turns)).float(), torch.from_numpy(scales).float()
    turned = batches.turned_crops(images, 4, torch.from_numpy(corners), flipped, *turn)
    moved = batches.shifted(images, torch.from_numpy(corners) - 4, flipped)
    factors = rng.uniform(0.5, 1.5, (count, 3))
    order = np.array([ORDERS[number % 6] for number in range(count)])
    coloured = batches.change_colours(
        images, torch.from_numpy(factors).float(), torch.from_numpy(order)
    )
    adjust = [
        functional.adjust_brightness, functional.adjust_contrast, functional.adjust_saturation
    ]  # fmt: skip
    for row in range(count):
        flip = functional.hflip if flipped[row] else (lambda image: image)
        how = InterpolationMode.BICUBIC if bicubic[row] else InterpolationMode.BILINEAR
        single = flip(functional.resized_crop(pil, *map(int, boxes[row]), [30, 30], how))
        off = (functional.pil_to_tensor(single).int() - made[row].int()).abs()
        assert off.max() <= 1  # Pillow's weights have 22 bits
        assert off.float().mean() < 0.1
        padded = functional.pad(pil, [4] * 4, padding_mode="reflect")
        single = functional.affine(
            padded, turns[row], [0, 0], scales[row], [0.0], InterpolationMode.BILINEAR
        )
        for found, expected, most in ((turned, single, 1), (moved, padded, 0)):
            cropped = flip(functional.crop(expected, *map(int, corners[row]), 24, 24))
            off = (functional.pil_to_tensor(cropped).int() - found[row].int()).abs()
            assert off.max() <= most
        single = pil
        for step in order[row]:
            single = adjust[step](single, factors[row, step])
        assert torch.equal(functional.pil_to_tensor(single), coloured[row])


@pytest.mark.parametrize("made", [PAPER, LIGHT, CROPS])
def test_batches_are_distributed_as_single_images(made, picture):
    random.seed(0), torch.manual_seed(0)
    count, single, pil = 400, made.train(24), functional.to_pil_image(picture)
    data = CIFAR100DataModule(augmentation=made, image_size=24)
    samples = [make_sample(single(pil), 0, 0) for _ in range(count)]
    theirs = data.normalise(collate(samples))["image"]
    batch = {"image": picture.repeat(count, 1, 1, 1), SIDES: torch.full((count, 2), 24)}
    changed = batch_augmentation(made, 24)(batch, draws(count))
    assert changed["image"].dtype == torch.uint8
    assert SIDES not in changed
    ours = data.normalise(changed)["image"]
    for power in (1, 2):  # means and second moments of each pixel
        one, other = (part.double() ** power for part in (ours, theirs))
        spread = ((one.var(0) + other.var(0)) / count).sqrt() + 1e-9
        assert ((one.mean(0) - other.mean(0)).abs() / spread).max() < 5
    assert len(ours.flatten(1).unique(dim=0)) > (count / 2 if made is not CROPS else 60)
    halves = ours.flatten(1)[::2].mean(1), ours.flatten(1)[1::2].mean(1)  # neighbours
    assert abs(torch.corrcoef(torch.stack(halves))[0, 1]) < 4 / (count / 2) ** 0.5


module = partial(SampleTransfer, train_per_class=1, val_per_class=1, num_workers=0, batch_size=10)


def of_epoch(data, epoch=0):
    loader = data.train_dataloader()
    loader.sampler.set_epoch(epoch)
    return list(loader)


@pytest.mark.parametrize("size", [40, 24])
def test_samples_keep_order_labels_and_draws(sample_cache, size):
    plain, kept = (
        module(sample_cache, augmentation=PAPER, image_size=size, resident=how)
        for how in (False, True)
    )
    plain.setup(), kept.setup()
    assert kept.loaded("train").entries["image"].shape == (100, 3, min(size, 32), min(size, 32))
    for one, other in zip(kept.val_dataloader(), plain.val_dataloader(), strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
    ours, theirs = of_epoch(kept), of_epoch(plain)
    assert kept.train_dataloader().num_workers == 0
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        assert one["image"].shape == other["image"].shape
        for key in ("label", "sample_id"):
            assert torch.equal(one[key], other[key])
        assert one["noise_seed"] != other["noise_seed"]
    again = module(sample_cache, augmentation=PAPER, image_size=size, resident=True, batch_size=5)
    again.setup()
    halves = [torch.cat([part["image"] for part in of_epoch(again)])]
    whole = torch.cat([part["image"] for part in ours])
    assert torch.equal(halves[0], whole)
    later = torch.cat([part["image"] for part in of_epoch(again, 1)])
    order = [torch.cat([b["sample_id"] for b in of_epoch(again, e)]).argsort() for e in (0, 1)]
    assert (whole[order[0]] != later[order[1]]).flatten(1).any(1).sum() > 90


@pytest.mark.parametrize(
    ("made", "options", "message"),
    [
        (PaperAugmentation(), {}, r"pass data.augmentation.auto_augment=null"),
        (PaperAugmentation(auto_augment=None, interpolation="lanczos"), {},
         r"train_interpolation must be one of bicubic, bilinear, random .*got \"lanczos\""),
        (object(), {}, "must be PaperAugmentation or LightAugmentation .*, got \"object\""),
        (LIGHT, {"token_labels": "maps"}, "data.token_labels must be null with data.resident=true"),
        (LIGHT, {"bands": 4}, "data.resident must be left out with data.bands"),
    ],
)  # fmt: skip
def test_what_batches_cannot_do_is_refused(made, options, message):
    refuses(message, ImageFolderDataModule, "/data", augmentation=made, resident=True, **options)


def test_too_many_images_are_refused_before_decoding(sample_cache, monkeypatch):
    data = module(sample_cache, augmentation=LIGHT, image_size=32, resident=True)
    data.setup()
    monkeypatch.setattr(resident, "machine_memory", lambda: 614_399)
    monkeypatch.setattr(data, "_loader", None)
    message = "keeps 614 KB of images on cpu, which has 614 KB free; lower data.image_size, or"
    refuses(message, data.train_dataloader)
