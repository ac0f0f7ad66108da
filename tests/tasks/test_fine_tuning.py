"""Fine-tuning of a trained classifier at a larger image size."""

from types import SimpleNamespace

import pytest
import torch
from timm.layers import resample_abs_pos_embed

from backbones import create_backbone
from backbones.checkpoints.opening import open_checkpoint
from heads.linear import LinearClassifier
from tasks.engine.loading import build_task
from tests.runs import composed

NAMES = tuple("abcde")


def data(names):
    """Return a stand-in for the data module of these classes."""
    return SimpleNamespace(
        head_arguments={"num_classes": len(names)}, task_arguments={"class_names": names},
        category_ids=(), other_orders={},
    )  # fmt: skip


DATA = data(NAMES)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    torch.manual_seed(0)
    model = LinearClassifier(create_backbone("deit_t", img_size=64), 5)
    path = tmp_path_factory.mktemp("trained") / "best.ckpt"
    tensors = {f"model.{key}": value for key, value in model.state_dict().items()}
    torch.save({"state_dict": tensors, "class_names": list(NAMES)}, path)
    return model, path


def task(path, *typed, data=DATA):
    config = composed("backbone=deit_t", "data.image_size=96", *typed)
    config.backbone["pretrained"] = path
    return build_task(config, data)


def test_the_classifier_stays_and_positions_are_resized(trained):
    model, path = trained
    tuned = task(str(path), "keep_classifier=true").model
    states = [network.classifier.state_dict() for network in (tuned, model)]
    torch.testing.assert_close(*states, rtol=0, atol=0)
    expected = resample_abs_pos_embed(model.backbone.pos_embed, [6, 6], [4, 4])
    torch.testing.assert_close(tuned.backbone.pos_embed, expected)
    images = torch.randn(2, 3, 96, 96)
    with torch.no_grad():  # as for the smaller network on larger images
        torch.testing.assert_close(tuned.eval()(images), model.eval()(images), rtol=1e-3, atol=1e-3)
    other = task(str(path)).model
    assert not torch.equal(other.classifier.weight, model.classifier.weight)


def test_checkpoints_record_the_options_of_their_network(tmp_path):
    typed = ("backbone.mixer.act=silu", "backbone.mixer.drop=0.1", "backbone.fc_norm=true")
    config = composed("backbone=deit_t", "data.image_size=96", "backbone.class_token=false", *typed)
    content = {}
    with torch.device("meta"):
        build_task(config, DATA).on_save_checkpoint(content)
    path = tmp_path / "best.ckpt"
    torch.save({"state_dict": {"model.x": torch.zeros(1)}, **content}, path)
    record = open_checkpoint(path).record
    assert (record["host"], record["token_mixer"]) == ("deit_t", None)
    mixer = {"name": "ffn", "hidden_ratio": None, "act": "silu", "drop": 0.1}
    assert record["mixer"] == mixer
    assert record["options"] == {"class_token": False, "fc_norm": True, "distilled": False}
    assert open_checkpoint(path).grids == {f"blocks.{index}.mlp": (6, 6) for index in range(12)}


def test_a_classifier_that_cannot_be_kept_is_refused(trained, monkeypatch):
    path, keep = str(trained[1]), "keep_classifier=true"
    for typed, names, said in (
        ([], "abcdx", "pass data with the classes of the checkpoint"),
        ([], "abc", "5 classes, and the data have 3"),
        (["task=transfer", "protocol=linear_probe"], NAMES, f"{keep} needs head=linear"),
    ):
        with pytest.raises(ValueError, match=said):
            task(path, keep, *typed, data=data(tuple(names)))
    assert task(False, "keep_classifier=true").model.classifier.out_features == 5
    monkeypatch.setattr("backbones.create_backbone", lambda **options: None)
    with pytest.raises(ValueError, match="fetches timm's weights without their classifier; pass"):
        task(True, "keep_classifier=true")
