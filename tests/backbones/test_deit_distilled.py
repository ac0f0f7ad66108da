"""DeiT with a distillation token against timm's network, and what trains its two classifiers."""

import pytest
import timm
import torch
import torch.nn.functional as F

from backbones import create_backbone
from heads.distillation import Distillation, TeacherLogits
from heads.linear import LinearClassifier
from tests.families import build_short

CLASSES = 6


def theirs():
    torch.manual_seed(0)
    model = timm.create_model("deit_tiny_distilled_patch16_224", num_classes=CLASSES)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return model.eval()


def ours(name="deit_t", **options):
    return LinearClassifier(build_short(name, distilled=True, **options), CLASSES)


def test_logits_equal_those_of_timms_network(tmp_path):
    reference = theirs()
    torch.save(reference.state_dict(), tmp_path / "timm.pth")
    model = LinearClassifier.from_pretrained("deit_t", tmp_path / "timm.pth", distilled=True).eval()
    images = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(model(images), reference(images), rtol=1e-4, atol=1e-4)
        embedding = reference.forward_head(reference.forward_features(images), pre_logits=True)
        torch.testing.assert_close(model.backbone.embed(images), embedding, rtol=1e-4, atol=1e-4)
    assert model.backbone.no_weight_decay == {"pos_embed", "cls_token", "dist_token"}
    count = sum(p.numel() for p in model.parameters())
    assert count == sum(p.numel() for p in reference.parameters())
    torch.save(model.state_dict(), tmp_path / "own.pth")
    larger = LinearClassifier.from_pretrained(
        "deit_t", tmp_path / "own.pth", distilled=True, img_size=256
    )
    assert larger.backbone.pos_embed.shape[1] == 2 + 16**2


def test_tokens_learn_from_the_teacher_or_the_labels():
    model = ours(img_size=64).train()
    images, labels = torch.randn(4, 3, 64, 64), torch.tensor([0, 1, 2, 3])
    taught = TeacherLogits(torch.randn(4, CLASSES), Distillation("hard", alpha=0.25))
    batch = {"image": images, "label": labels, "taught": taught}
    losses = model.loss(batch)
    first, second = model.classifier.outputs(model.backbone.features(images))
    torch.testing.assert_close(losses["loss_cls"], 0.75 * F.cross_entropy(first, labels))
    answers = taught.logits.argmax(1)
    torch.testing.assert_close(losses["loss_teacher"], 0.25 * F.cross_entropy(second, answers))
    losses["loss_cls"].backward()
    assert model.classifier.dist.weight.grad is None
    assert model.classifier.weight.grad is not None
    sum(model.loss(batch).values()).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model = ours(img_size=64).train()
    images, labels = torch.randn(2, 3, 64, 64), torch.tensor([0, 3])
    loss = model.loss({"image": images, "label": labels})["loss_cls"]
    torch.testing.assert_close(loss, F.cross_entropy(model(images), labels))
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_weights_with_and_without_the_token(tmp_path):
    torch.save(theirs().state_dict(), tmp_path / "distilled.pth")
    with pytest.raises(ValueError, match=r"a distillation token.*build it with distilled=true"):
        create_backbone("deit_t", pretrained=tmp_path / "distilled.pth")
    plain = LinearClassifier(create_backbone("deit_t"), CLASSES)
    torch.save(plain.state_dict(), tmp_path / "plain.pth")
    with pytest.raises(ValueError, match=r"lack a distillation token.*with distilled=false"):
        create_backbone("deit_t", distilled=True, pretrained=tmp_path / "plain.pth")
    with pytest.raises(ValueError, match="distilled=True needs class_token=True"):
        create_backbone("deit_t", distilled=True, class_token=False)
