"""The linear classifier and the linear probe."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from backbones import Backbone, FeatureInfo, create_backbone
from heads.linear import LinearClassifier, LinearProbe
from tasks.engine.optimisation.optimizer import build_optimizer
from tests.errors import refuses

SMALLEST = "poolformer_s12_afbo"


def classifier(num_classes=5, **options):
    torch.manual_seed(0)
    return LinearClassifier(create_backbone(SMALLEST), num_classes, **options)


def images(batch=2, side=64):
    return torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(1))


def test_label_smoothing_is_for_training_only():
    model = classifier(label_smoothing=0.3)
    batch = {"image": images(), "label": torch.tensor([1, 4])}
    with torch.no_grad():
        for training, smoothing in ((True, 0.3), (False, 0.0)):
            model.train(training)
            logits = model(batch["image"])
            (loss,) = model.loss(batch).values()
            expected = F.cross_entropy(logits, batch["label"], label_smoothing=smoothing)
            torch.testing.assert_close(loss, expected)


def test_loss_takes_shares_of_classes():
    model = classifier().eval()
    shares = torch.tensor([[0.2, 0.8, 0, 0, 0], [0, 0, 0.5, 0, 0.5]])
    with torch.no_grad():
        logits = model.predict({"image": images()})
        loss = model.loss({"image": images(), "label": shares})["loss_cls"]
    torch.testing.assert_close(loss, -(shares * logits.log_softmax(-1)).sum(-1).mean())


def test_weights_round_trip(tmp_path):
    model, other = classifier(), classifier()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.01)
    torch.save(other.state_dict(), tmp_path / "weights.pth")
    assert not model.load_weights(tmp_path / "weights.pth").initialised
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=0, atol=0)


def test_other_weights_and_numbers_of_classes_are_rejected(tmp_path):
    torch.save(classifier(7).state_dict(), tmp_path / "seven.pth")
    with pytest.raises(ValueError, match=r"seven\.pth was trained on 7 classes, this data has 5"):
        classifier(5).load_weights(tmp_path / "seven.pth")
    torch.save(classifier().backbone.state_dict(), tmp_path / "bare.pth")
    with pytest.raises(ValueError, match=r"holds a backbone without .*backbone\.pretrained"):
        classifier().load_weights(tmp_path / "bare.pth")
    refuses("num_classes must be at least 1, got 0", classifier, 0)


@pytest.mark.parametrize("name", [SMALLEST, "swin_t_afbo"])
def test_probe_trains_the_classifier_alone(name):
    model = LinearProbe(create_backbone(name), 5).train()
    assert model.training
    assert model.norm.training
    assert not any(module.training for module in model.backbone.modules())
    assert not any(parameter.requires_grad for parameter in model.backbone.parameters())
    before = copy.deepcopy(model.state_dict())
    optimizer = build_optimizer(model, name="sgd", lr=0.1, momentum=0.9, weight_decay=0.1)
    model.loss({"image": images(4), "label": torch.arange(4)})["loss_cls"].backward()
    with_gradient = {name for name, p in model.named_parameters() if p.grad is not None}
    assert with_gradient == {"classifier.weight", "classifier.bias"}
    optimizer.step()
    assert set(optimizer.state) == set(model.classifier.parameters())
    changed = {key for key, value in model.state_dict().items() if not value.equal(before[key])}
    assert {"classifier.weight", "classifier.bias", "norm.running_mean"} <= changed
    assert not any(key.startswith("backbone.") for key in changed)


class NormedBackbone(Backbone):
    """A small backbone with running statistics, which all registered hosts lack."""

    feature_info = (FeatureInfo(4, 4),)
    num_features = 4

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 4, 4), nn.BatchNorm2d(4), nn.ReLU())

    def embed(self, images):
        return self.stem(images).mean((2, 3))


def test_probe_leaves_running_statistics_alone():
    model = LinearProbe(NormedBackbone(), 5).train()
    before = copy.deepcopy(model.backbone.state_dict())
    for _ in range(3):
        model.loss({"image": images(4), "label": torch.arange(4)})["loss_cls"].backward()
    torch.testing.assert_close(model.backbone.state_dict(), before, rtol=0, atol=0)


def test_probe_standardises_features_without_scale_or_shift():
    model = LinearProbe(NormedBackbone(), 5).train()
    features = model.backbone.embed(images(16))
    variance, mean = torch.var_mean(features, 0, correction=0)
    centred = (features - mean) / (variance + 1e-6).sqrt()
    expected = F.linear(centred, model.classifier.weight, model.classifier.bias)
    torch.testing.assert_close(model(images(16)), expected, rtol=1e-4, atol=1e-5)
