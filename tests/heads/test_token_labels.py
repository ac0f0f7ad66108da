"""Token labels against a written-out RoIAlign, and LVT's losses on them."""

import math
from types import SimpleNamespace

import pytest
import timm
import torch

from backbones import create_backbone
from backbones.hosts.lvt.mix_token import draw_box, own_share
from heads.dense_logits import dense_logits
from heads.linear import LinearClassifier
from heads.losses import Targets, classification_losses
from heads.token_label_maps import token_labels
from tasks.classification.task import ClassificationTask
from tests.families import short
from tests.runs import RECIPE

CLASSES = 7
NAMES = [str(number) for number in range(CLASSES)]


def maps(count=2, side=6, top=3):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(count, top, side, side, generator=generator, dtype=torch.float64)
    order = torch.rand(count, CLASSES, side, side, generator=generator).argsort(1)
    return scores, order[:, :top]


def bilinear(grid, y, x):
    """Return the value at a point of a map (K, h, w), 0 more than one cell outside."""
    height, width = grid.shape[1:]
    if not (-1 <= y <= height and -1 <= x <= width):
        return torch.zeros(len(grid), dtype=grid.dtype)
    y, x = max(y, 0.0), max(x, 0.0)
    top, left = min(int(y), height - 1), min(int(x), width - 1)
    bottom, right = min(top + 1, height - 1), min(left + 1, width - 1)
    down, across = (y - top) * (bottom > top), (x - left) * (right > left)
    upper = (1 - across) * grid[:, top, left] + across * grid[:, top, right]
    lower = (1 - across) * grid[:, bottom, left] + across * grid[:, bottom, right]
    return (1 - down) * upper + down * lower


def cut_out(grid, box, size):
    """Return means of points at most one cell apart, in size x size parts of a box."""
    left, top, right, bottom = box
    steps = [max(bottom - top, 1) / size, max(right - left, 1) / size]
    counts = [math.ceil(step) for step in steps]
    result = torch.zeros(len(grid), size, size, dtype=grid.dtype)
    for row in range(size):
        for column in range(size):
            for i in range(counts[0]):
                for j in range(counts[1]):
                    y = top + steps[0] * (row + (i + 0.5) / counts[0])
                    x = left + steps[1] * (column + (j + 0.5) / counts[1])
                    result[:, row, column] += bilinear(grid, y, x)
    return result / (counts[0] * counts[1])


@pytest.mark.parametrize("size", [3, 7])
def test_labels_are_cut_out_of_the_dense_map(size):
    scores, classes = maps()
    boxes = torch.tensor([[0.1, 0.3, 0.8, 0.95], [0, 0, 1, 1]], dtype=torch.float64)
    got = token_labels(scores, classes, boxes, CLASSES, (size, size))
    assert got.shape == (2, CLASSES, 1 + size**2)
    for image in range(2):
        dense = torch.zeros(CLASSES, 6, 6, dtype=torch.float64)
        for place in torch.cartesian_prod(*map(torch.arange, scores.shape[1:])).tolist():
            kept, row, column = place
            dense[classes[image, kept, row, column], row, column] = scores[image, kept, row, column]
        box = (6 * boxes[image] - 0.5).tolist()
        parts = [cut_out(dense, box, 1).flatten(1), cut_out(dense, box, size).flatten(1)]
        expected = torch.cat(parts, 1).softmax(0)
        torch.testing.assert_close(got[image], expected, rtol=1e-9, atol=1e-12)


@pytest.fixture(scope="module")
def lvt():
    torch.manual_seed(0)
    return LinearClassifier(create_backbone("lvt_r1"), CLASSES, label_smoothing=0.1).double()


def test_all_tokens_learn_from_token_labels(lvt):
    images = torch.randn(2, 3, 64, 96, dtype=torch.float64)
    shares = torch.rand(2, CLASSES, 1 + 6, dtype=torch.float64).softmax(1)
    lvt.train()
    for seed in range(40):
        torch.manual_seed(seed)
        own = own_share(draw_box((2, 3)), (2, 3))
        if own < 1:
            break
    torch.manual_seed(seed)
    batch = {"image": images, "label": torch.tensor([1, 4]), "token_labels": shares}
    losses = lvt.loss(batch)
    torch.manual_seed(seed)
    logits, tokens = lvt.classifier.outputs(lvt.backbone.features(images))
    smoothed = 0.9 * shares + 0.1 / CLASSES
    image = own * smoothed[:, :, 0] + (1 - own) * smoothed[:, :, 0].flip(0)
    first = -(image * logits.log_softmax(1)).sum(1).mean()
    each = -(smoothed[:, :, 1:].transpose(1, 2) * tokens.log_softmax(2)).sum(2).mean()
    torch.testing.assert_close(losses["class_token"], first)
    torch.testing.assert_close(losses["tokens"], each)
    torch.testing.assert_close(losses["loss_cls"], first + 0.5 * each)


def test_wrong_token_counts_and_networks_are_rejected(lvt):
    lvt.train()
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    batch = {"image": images, "label": torch.tensor([1, 4])}
    with pytest.raises(ValueError, match="6 token labels per image do not match 4 tokens"):
        lvt.loss(batch | {"token_labels": torch.zeros(2, CLASSES, 7)})
    plain = LinearClassifier(create_backbone("lvt_r1", class_blocks=False), CLASSES)
    targets = Targets(batch["label"], token_labels=torch.zeros(2, CLASSES, 5))
    with pytest.raises(ValueError, match=r"need a network that classifies its tokens"):
        classification_losses(plain.classifier, images, targets)


LABELLED = SimpleNamespace(token_labels="maps")  # stands in for a datamodule


def test_a_task_makes_labels_of_as_many_tokens_as_its_network_has(lvt):
    task = ClassificationTask(lvt, NAMES, **RECIPE)
    scores, classes = maps()
    boxes = torch.tensor([[0.1, 0.3, 0.8, 0.95], [0, 0, 1, 1]])
    images = torch.randn(2, 3, 70, 96, dtype=torch.float64)
    batch = {"image": images, "label": torch.tensor([1, 4]), "token_scores": scores.float(),
             "token_classes": classes, "token_box": boxes}  # fmt: skip
    prepared = task.prepare_batch(batch)
    expected = token_labels(scores.float(), classes, boxes, CLASSES, (3, 3))
    torch.testing.assert_close(prepared["token_labels"], expected.double())
    lvt.train()
    assert torch.isfinite(lvt.loss(prepared)["loss_cls"])
    task.prepare_training(LABELLED)


@pytest.mark.parametrize("name", ["lvt_r1", "convnext_t", "visionllama_s", "resnet18", "deit_t",
                                  "poolformer_s12", "lvt_r1 plain"])  # fmt: skip
def test_logits_per_position(name):
    """One position gives the image's logits and ignores other positions."""
    name, _, plain = name.partition(" ")
    backbone = create_backbone(name, class_blocks=False) if plain else short(name)
    network = LinearClassifier(backbone, CLASSES).eval()
    stride = network.backbone.feature_info[-1].stride
    images = torch.randn(2, 3, 64, 96)
    scores = dense_logits(network, images)
    assert scores.shape == (2, CLASSES, 64 // stride, 96 // stride)
    if name == "deit_t":
        return
    if name == "resnet18" or plain:  # only a linear layer follows the mean
        found = scores.mean((2, 3))
    elif name == "lvt_r1":
        own = network.classifier.outputs(network.backbone.features(images))[0]
        found = own + 0.5 * scores.amax((2, 3))
    else:
        images = images[:, :, :32, :32]
        found = dense_logits(network, images)[:, :, 0, 0]
    torch.testing.assert_close(found, network(images), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "test_convnext", "test_efficientnet"])
def test_logits_per_position_of_timm_networks(name):
    network = timm.create_model(name, num_classes=CLASSES).eval()
    images = torch.randn(2, 3, 160, 160)
    scores = dense_logits(network, images)
    assert scores.shape[:2] == (2, CLASSES)
    assert scores.shape[2] == scores.shape[3] > 1
    if name in ("test_resnet", "test_efficientnet"):
        torch.testing.assert_close(scores.mean((2, 3)), network(images), rtol=1e-4, atol=1e-4)
