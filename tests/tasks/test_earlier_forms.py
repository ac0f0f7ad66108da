"""Networks that were saved while a mixer had another default give their numbers."""

import pytest
import torch
import yaml
from lightning import Trainer

from backbones import create_backbone, mixer_options
from backbones.checkpoints.earlier_forms import ADDED, take_earlier_forms
from backbones.checkpoints.earlier_forms import EARLIER as EARLIER_FORMS
from backbones.checkpoints.equations import RECORD
from backbones.checkpoints.opening import open_checkpoint
from backbones.registry import find_mixer
from heads.linear import LinearClassifier
from tasks import ClassificationTask
from tasks.engine.checkpoints.entries import BUILT
from tasks.engine.run_folder.earlier_releases import with_earlier_options
from tasks.engine.run_folder.schemas import read_run_config
from tests.families import rest_slow
from tests.runs import QUIET
from tests.tensors import images, randomise

SIZE = {"img_size": 64}
EARLIER = {"norm": "batch", "dw_residual": False}
X = images(64, 64, batch=2).float()


@pytest.fixture(scope="module")
def earlier():
    """A classifier in the earlier form, with its logits."""
    torch.manual_seed(0)
    backbone = create_backbone("deit_t_iffn_bn", **SIZE)
    model = randomise(LinearClassifier(backbone, 3)).float().eval()
    with torch.no_grad():
        return model, model(X)


def test_configs_without_the_options_are_of_the_earlier_form():
    def options(name, mixer):
        config = with_earlier_options({"backbone": {"name": name, "mixer": mixer}})
        return config["backbone"]["mixer"]

    assert options("deit_t_iffn", {"dw_residual": True, "drop": 0.1}) == {
        "norm": "batch", "dw_residual": True, "drop": 0.1,
    }  # fmt: skip
    assert options("swin_t_iffn", None) == EARLIER
    new = {"norm": "layer", "dw_residual": "outside"}
    assert options("swin_t_iffn", new) == new
    for name in ("deit_t_affn", "deit_t_iffn_bn", "deit_t"):
        assert options(name, None) is None


def test_run_folders_without_the_options_are_of_the_earlier_form(tmp_path):
    parts = {part: {"_target_": "x.Y"} for part in ("head", "data", "task")}
    backbone = {"name": "deit_t_iffn", "mixer": {"n_branches": 2, "dw_residual": False}}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({"task_name": "classification", "backbone": backbone, **parts}))
    assert read_run_config(file)["backbone"]["mixer"]["norm"] == "batch"


@pytest.mark.parametrize("age", ["earlier", "new"])
def test_checkpoints_outside_run_folders(age, earlier, tmp_path):
    name, path = "deit_t_iffn_bn" if age == "earlier" else "deit_t_iffn", tmp_path / "task.ckpt"
    model = LinearClassifier(create_backbone(name, **SIZE), 3)
    model = randomise(model).float().eval() if age == "new" else earlier[0]
    task = ClassificationTask(model, ["a", "b", "c"])
    trainer = Trainer(default_root_dir=tmp_path, **QUIET)
    trainer.strategy.connect(task)
    trainer.save_checkpoint(path)
    content = torch.load(path, weights_only=False)
    config = content[BUILT]["backbone"]
    assert config["mixer"]["norm"] == ("batch" if age == "earlier" else "layer")
    if age == "earlier":  # as an earlier commit wrote it
        config |= {"name": "deit_t_iffn", "mixer": None}
        torch.save(content, path)
    again = ClassificationTask.load_from_checkpoint(path).model.eval()
    with torch.no_grad():
        torch.testing.assert_close(again(X), model(X))


def test_configs_of_the_toolkits_take_the_form_of_their_weights(earlier, tmp_path):
    mm = pytest.importorskip("backbones.mm")
    model, _ = earlier
    x = X
    with torch.no_grad():
        expected = model.backbone.embed(x)
    torch.save({"state_dict": model.backbone.state_dict()}, tmp_path / "weights.pth")
    for load in ("load_weights", "load_state_dict"):
        built = mm.build_toolkit_backbone("deit_t_iffn", out_type="embedding", **SIZE)
        if load == "load_weights":
            built.load_weights(str(tmp_path / "weights.pth"))
        else:
            built.load_state_dict(model.backbone.state_dict())
        with torch.no_grad():
            torch.testing.assert_close(built.eval()(x)[0], expected)
        assert {key: built.record["mixer"][key] for key in EARLIER} == EARLIER
    named = mm.build_toolkit_backbone(
        "deit_t_iffn", out_type="embedding", mixer={"norm": "layer"}, **SIZE
    )
    with pytest.raises(RuntimeError, match="ln_mid"):
        named.load_state_dict(model.backbone.state_dict())


def test_folders_of_timm_take_the_form_of_their_weights(earlier, tmp_path):
    timm = pytest.importorskip("timm")
    pytest.importorskip("backbones.timm_models")
    model, logits = earlier
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    overlay = {"file": str(tmp_path / "weights.pth"), "num_classes": 3}
    opened = timm.create_model(
        "deit_t_iffn", pretrained=True, num_classes=3, pretrained_cfg_overlay=overlay, **SIZE
    )
    with torch.no_grad():
        torch.testing.assert_close(opened.eval()(X), logits)


def test_create_backbone_asks_for_the_form(earlier, tmp_path):
    torch.save(earlier[0].state_dict(), tmp_path / "weights.pth")
    assert open_checkpoint(tmp_path / "weights.pth").tensors
    with pytest.raises(ValueError, match=r"batch norms, .* backbone\.mixer\.norm=batch"):
        create_backbone("deit_t_iffn", pretrained=tmp_path / "weights.pth", **SIZE)


SMALL = {"name": "timm", "model": "test_convnext", "img_size": 64}


def saved_by_an_earlier_version(kind, name, path):
    """Save a classifier whose mixer has an earlier default, which configs and records may lack."""
    form = EARLIER_FORMS[name]
    torch.manual_seed(0)
    backbone = create_backbone(**SMALL, **{kind: {"name": name, **form}})
    model = randomise(LinearClassifier(backbone, 3)).float().eval()
    task = ClassificationTask(model, ["a", "b", "c"])
    trainer = Trainer(default_root_dir=path.parent, **QUIET)
    trainer.strategy.connect(task)
    trainer.save_checkpoint(path)
    content = torch.load(path, weights_only=False)
    for entry in (content[BUILT]["backbone"][kind], content[RECORD][kind]):
        assert form.items() <= entry.items()
        for option in form.keys() & ADDED:
            del entry[option]
    torch.save(content, path)
    return model


@pytest.mark.parametrize("name", rest_slow(EARLIER_FORMS, ["wave", "rala"]))
def test_checkpoints_of_earlier_defaults_load_as_what_they_were(name, tmp_path):
    """As weights of a backbone, as a task, and in a resumed run."""
    form, kind = EARLIER_FORMS[name], kind_of(name)
    x, path = images(64, 64, batch=2).float(), tmp_path / "task.ckpt"
    model = saved_by_an_earlier_version(kind, name, path)
    resumed = ClassificationTask(
        LinearClassifier(create_backbone(**SMALL, **{kind: {"name": name}}), 3), ["a", "b", "c"]
    )
    content = torch.load(path, weights_only=False)
    resumed.on_load_checkpoint(content)
    resumed.load_state_dict(content["state_dict"])
    opened = {
        "backbone": create_backbone(**SMALL, **{kind: {"name": name}}, pretrained=path),
        "task": ClassificationTask.load_from_checkpoint(path).model.backbone,
        "resumed": resumed.model.backbone,
    }
    with torch.no_grad():
        expected = model.backbone.embed(x)
        for backbone in opened.values():
            assert form.items() <= backbone.record[kind].items()
            (first, *_) = [part for part in backbone.modules() if hasattr(part, next(iter(form)))]
            assert {option: getattr(first, option) for option in form} == form
            torch.testing.assert_close(backbone.eval().embed(x), expected)
        if name in ("retention", "wave", "rala"):  # typed options stay, with a warning
            typed = {"name": name, **{option: mixer_options(name)[option] for option in form}}
            with pytest.warns(UserWarning, match=f"{next(iter(form))}=.* instead of"):
                kept = create_backbone(**SMALL, **{kind: typed}, pretrained=path).eval()
            assert (kept.embed(x) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["retention", "wave", "rwkv_channel_mix"])
def test_exports_to_toolkits_without_the_option_are_of_the_earlier_form(name):
    """Exports name all options of their version."""
    kind, form = kind_of(name), EARLIER_FORMS[name]
    given = {"name": name, **mixer_options(name), **form}
    for left_out in (form.keys(), ()):
        old = {key: value for key, value in given.items() if key not in left_out}
        backbone = create_backbone(**SMALL, **{kind: old})
        take_earlier_forms(backbone, backbone.state_dict())
        assert form.items() <= backbone.record[kind].items()
    typed = create_backbone(**SMALL, **{kind: {"name": name}})
    take_earlier_forms(typed, typed.state_dict())
    assert not form.items() <= typed.record[kind].items()


def kind_of(name):
    return "token_mixer" if find_mixer(name).kind == "token" else "mixer"
