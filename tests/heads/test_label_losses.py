"""Losses by name against plain formulas, in float64 or by torch's own."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from backbones import create_backbone
from heads.label_losses import LabelLoss, MultiLabelLoss
from heads.linear import LinearClassifier
from tests.errors import refuses
from tests.joined import run_joined

torch.manual_seed(0)
LOGITS = torch.randn(6, 4)
LABELS = torch.tensor([0, 1, 3, 2, 1, 0])
FLAGS = torch.tensor(
    [[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, 0], [0, 0, 1, 1], [1, 0, 0, 0]]
)
WEIGHTS = [0.5, 2.0, 1.0, 3.0]
P, Q = LOGITS.sigmoid(), LOGITS.softmax(1)


def picked(values):
    return values[torch.arange(6), LABELS]


def asymmetric(gamma_pos, gamma_neg):
    """Equation 7 for one label, with classes that exclude each other."""
    truth = F.one_hot(LABELS, 4)
    factor = torch.where(truth == 1, (1 - Q) ** gamma_pos, Q**gamma_neg)
    return -(truth * factor * Q.log()).sum(1).mean()


ONE = {
    "cross_entropy": (LabelLoss(), F.cross_entropy(LOGITS, LABELS)),
    "weighted": (
        LabelLoss(class_weights=WEIGHTS),
        F.cross_entropy(LOGITS, LABELS, torch.tensor(WEIGHTS)),
    ),
    "focal": (LabelLoss("focal"), (-((1 - picked(Q)) ** 2) * picked(Q).log()).mean()),
    "focal without focus": (
        LabelLoss("focal", class_weights=WEIGHTS, gamma=0),
        F.cross_entropy(LOGITS, LABELS, torch.tensor(WEIGHTS)),
    ),
    "bce": (
        LabelLoss("bce"),
        F.binary_cross_entropy_with_logits(LOGITS, F.one_hot(LABELS, 4).float()),
    ),
    "asymmetric": (LabelLoss("asymmetric"), asymmetric(1, 4)),
    "asymmetric without focus": (
        LabelLoss("asymmetric", gamma_pos=0, gamma_neg=0),
        F.cross_entropy(LOGITS, LABELS),
    ),
}
SHIFTED = (P - 0.05).clamp(min=0)
TERMS = FLAGS * P.log() + (1 - FLAGS) * (1 - P).log()
FACTORS = torch.where(FLAGS == 1, 0.25 * (1 - P) ** 2, 0.75 * P**2)
SEVERAL = {
    "bce": (MultiLabelLoss(), -TERMS.mean()),
    "focal": (MultiLabelLoss("focal"), -(FACTORS * TERMS).mean()),
    "asymmetric": (
        MultiLabelLoss("asymmetric"),
        -(FLAGS * (1 - P) * P.log() + (1 - FLAGS) * SHIFTED**4 * (1 - SHIFTED).log()).sum(1).mean(),
    ),
}


@pytest.mark.parametrize("name", ONE)
def test_a_loss_of_one_label_follows_its_equation(name):
    loss, expected = ONE[name]
    assert loss(LOGITS, LABELS) == pytest.approx(float(expected), rel=1e-5)
    rounded = LOGITS.bfloat16()
    torch.testing.assert_close(loss(rounded, LABELS), loss(rounded.float(), LABELS), rtol=0, atol=0)
    tokens, labels = torch.stack([LOGITS] * 3, 2), LABELS[:, None].expand(6, 3)
    assert loss(tokens, labels) == pytest.approx(float(expected), rel=1e-5)
    if loss.name != "asymmetric" and loss.class_weights is None:
        shares = F.one_hot(LABELS, 4).float()
        assert loss(LOGITS, shares) == pytest.approx(float(expected), rel=1e-5)
        smoothed = float(loss(LOGITS, shares * 0.9 + 0.025))
        assert loss(LOGITS, LABELS, 0.1) == pytest.approx(smoothed, rel=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(
    ("loss", "labels"),
    [
        *((loss, LABELS) for loss, _ in ONE.values()),
        *((loss, FLAGS.float()) for loss, _ in SEVERAL.values()),
        (LabelLoss(class_weights=WEIGHTS), F.one_hot(LABELS, 4).float()),
    ],
)
def test_processes_with_parts_of_a_batch_have_the_loss_of_all(loss, labels, smoothing, monkeypatch):

    def gradient(images=slice(None)):
        logits = LOGITS.clone().requires_grad_()
        value = loss(logits[images], labels[images], smoothing)
        value.backward()
        return value.detach(), logits.grad

    whole = gradient()
    thirds = [partial(gradient, slice(start, start + 2)) for start in (0, 2, 4)]
    found = run_joined(thirds, monkeypatch)
    for own, parts in zip(whole, zip(*found, strict=True), strict=True):
        torch.testing.assert_close(torch.stack(parts).mean(0), own)
    with torch.no_grad():  # here an exchange would wait for the others
        assert loss(LOGITS, labels, smoothing) == pytest.approx(float(whole[0]))


@pytest.mark.parametrize("name", SEVERAL)
def test_a_loss_of_several_labels_follows_its_equation(name):
    loss, expected = SEVERAL[name]
    flags, rounded = FLAGS.float(), LOGITS.bfloat16()
    assert loss(LOGITS, flags) == pytest.approx(float(expected), rel=1e-5)
    torch.testing.assert_close(loss(rounded, flags), loss(rounded.float(), flags), rtol=0, atol=0)
    tokens, labels = (torch.stack([one] * 3, 2) for one in (LOGITS, FLAGS.float()))
    assert loss(tokens, labels) == pytest.approx(float(expected), rel=1e-5)


def test_balanced_weights_are_inverse_to_counts():
    loss = LabelLoss(class_weights="balanced")
    assert loss.needs_counts
    loss.prepare([1, 2, 5])
    assert loss.weights.tolist() == pytest.approx([8 / 3, 4 / 3, 8 / 15])
    refuses("class 1 lacks training images", loss.prepare, [1, 0, 5])


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (
            LabelLoss,
            {"gamma": 2.0},
            "gamma does not apply to cross_entropy here, which takes class",
        ),
        (LabelLoss, {"name": "focal", "gamma": -1.0}, "gamma must be at least 0, got -1"),
        (
            MultiLabelLoss,
            {"class_weights": "balanced"},
            "does not apply to bce .* takes no options",
        ),
        (MultiLabelLoss, {"name": "focal", "alpha": 2.0}, "alpha must be from 0 to 1, got 2"),
        (MultiLabelLoss, {"name": "cross_entropy"}, "must be one of bce, focal, asymmetric"),
        (LabelLoss, {"class_weights": [1.0, 0.0]}, "a list of a positive weight per class"),
        (LabelLoss, {"class_weights": "equal"}, "class_weights=equal must be balanced, or a list"),
    ],
)
def test_wrong_options_are_named(kind, options, said):
    refuses(said, kind, **options)


def test_a_classifier_uses_the_loss_of_its_batch():
    model = LinearClassifier(create_backbone("resnet18", img_size=64), 4).eval()
    batch = {"image": torch.randn(6, 3, 64, 64), "label": LABELS}
    with torch.no_grad():
        focal = model.loss(batch | {"label_loss": LabelLoss("focal")})
        usual = model.loss(batch)
        expected = LabelLoss("focal")(model(batch["image"]), LABELS)
        plain = F.cross_entropy(model(batch["image"]), LABELS)
    assert sum(focal.values()) == pytest.approx(float(expected), rel=1e-5)
    assert sum(usual.values()) == pytest.approx(float(plain), rel=1e-5)
