"""Transforms of images for classification: equal to torchvision's and timm's."""

import random

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform
from torchvision import transforms

from datamodules import LightAugmentation, PaperAugmentation
from datamodules.images.transforms import ToNormalised

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture
def image():
    pixels = np.random.default_rng(0).integers(0, 256, (90, 70, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.mark.parametrize("size", [(70, 90), (1, 1), (33, 2)])  # the first one has all 256 values
def test_normalised_as_by_torchvisions_two_steps(image, size):
    image = image.crop((0, 0, *size))
    theirs = transforms.Compose([transforms.ToTensor(), transforms.Normalize(MEAN, STD)])
    ours = ToNormalised(MEAN, STD)(image)
    assert torch.equal(ours, theirs(image))
    assert ours.is_contiguous()


@pytest.mark.parametrize("policy", ["rand-m9-mstd0.5-inc1", "augmix-m5-w4-d2", None])
def test_paper_images_equal_timms(image, policy):
    ours = PaperAugmentation(auto_augment=policy, random_erasing=1.0)
    theirs = create_transform(
        32, is_training=True, auto_augment=policy, color_jitter=0.4, re_prob=1.0, re_mode="pixel",
        interpolation="bicubic", mean=MEAN, std=STD,
    )  # fmt: skip
    made = []
    for transform in (ours.train(32), theirs):
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        made.append(torch.stack([transform(image) for _ in range(8)]))
    assert torch.equal(*made)
    evaluation = create_transform(32, interpolation="bicubic", crop_pct=0.9, mean=MEAN, std=STD)
    assert torch.equal(ours.eval(32)(image), evaluation(image))


@pytest.mark.parametrize("made", [PaperAugmentation(), LightAugmentation()])
def test_transforms_print_like_torchvisions(made):
    for transform in (made.train(32), made.eval(32)):
        (written,) = (line for line in repr(transform).splitlines() if "ToNormalised" in line)
        assert written.strip() == f"ToNormalised(mean={[*MEAN]}, std={[*STD]})"
