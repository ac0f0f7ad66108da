"""Our backbones in the MM toolkits, exports to them, and the way back."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import yaml
from torch import nn
from torch.utils.data import DataLoader

from backbones import create_backbone
from heads.linear import LinearClassifier
from tests.families import HOSTS, SMALLEST, by_turns, drawn, rest_slow, rest_slow_pairs
from tests.runs import arguments, completed
from tools import export

pytest.importorskip("mmdet")
pytest.importorskip("mmseg")
pytest.importorskip("mmpretrain")

from mmengine import Config
from mmengine.logging import MMLogger
from mmengine.model import PretrainedInit
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS, OPTIM_WRAPPER_CONSTRUCTORS, DefaultScope

import backbones.mm  # noqa: F401  registers our hosts
from tasks.engine.optimisation.param_groups import parameter_rules
from tools.exports.mm_configs import training_config
from tools.exports.requests import MARK, new_folder
from tools.exports.standalone import check_standalone

TOOLKITS = ("mmdet", "mmseg", "mmpretrain")
# The smallest of each family, each with another mixer.
QUICK = ("deit_t_iffn", "swin_t_afbo", "poolformer_s12_glu")
SMALL = rest_slow((*QUICK, "ffnet_1", "sbm_t_convglu", "posmlp_t", "gmlp_ti_ggqpe"), QUICK)
SIZE = "image_size=64"
TRAINED = "poolformer_s12_afbo"


@pytest.fixture(autouse=True)
def no_logger_stays():
    """A toolkit's Runner leaves a logger, to whose file the next model would write."""
    yield
    MMLogger._instance_dict.clear()


def build(name, scope="mmengine", **options):
    with DefaultScope.overwrite_default_scope(scope):
        return MODELS.build({"type": name, **options})


def images():
    return torch.randn(2, 3, 64, 96, generator=torch.Generator().manual_seed(1))


def run_export(tmp_path, *typed):
    """Run the command and return its folder."""
    assert export.main([*typed, f"out={tmp_path / 'out'}"]) == 0
    return tmp_path / "out"


@pytest.mark.parametrize("name", SMALL)
@torch.no_grad()
def test_maps_equal_those_of_the_backbone(name):
    ours = create_backbone(name, dense=True).eval()
    theirs = build(name, out_indices=[3, 1]).eval()
    theirs.load_state_dict(ours.state_dict())
    expected = tuple(ours(images())[index] for index in (3, 1))
    torch.testing.assert_close(theirs(images()), expected, rtol=0, atol=0)


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
@pytest.mark.parametrize("prefix", [{}, {"prefix": "backbone."}])
def test_init_cfg_loads_and_reports(tmp_path, capfd, suffix, prefix):
    source = create_backbone("poolformer_s12", dense=True)
    tensors = {f"backbone.{k}": v for k, v in source.state_dict().items()}
    path = tmp_path / f"weights.{suffix}"
    (safetensors.torch.save_file if suffix == "safetensors" else torch.save)(tensors, path)
    init = {"type": "Pretrained", "checkpoint": str(path), **prefix}
    backbone = build("poolformer_s12", init_cfg=init)
    backbone.init_weights()
    said = "".join(capfd.readouterr())  # mmengine's logger prints it; its file has it too
    assert f"{len(tensors)} tensors loaded, of these 0 resized" in said
    torch.testing.assert_close(backbone.state_dict(), source.state_dict(), rtol=0, atol=0)


def test_init_cfg_of_another_model_is_rejected(tmp_path):
    torch.save(create_backbone("deit_t", dense=True).state_dict(), tmp_path / "deit.pth")
    init = {"type": "Pretrained", "checkpoint": str(tmp_path / "deit.pth")}
    zoo, differ = "torchvision://resnet18", r"does not fit sbm_t: \d+ keys differ \(missing "
    for name, change, said in (
        *(("sbm_t", {"type": kind}, differ)
          for kind in ("Pretrained", "mmengine.Pretrained", PretrainedInit)),
        ("deit_t", {"prefix": "neck"}, "no keys behind init_cfg.prefix='neck'; it has blocks"),
        ("resnet18", {"checkpoint": zoo}, f"={zoo} has an unsupported address; download it"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            build(name, init_cfg=init | change).init_weights()


@pytest.mark.parametrize(
    ("name", "dense"),
    rest_slow_pairs(
        [*((host, dense) for host in HOSTS for dense in (False, True)),
         *((name, True) for name in drawn(0) if name not in HOSTS)],
        [(host, True) for host in SMALLEST],
    ),
)  # fmt: skip
def test_every_parameter_has_a_layer(name, dense):
    with torch.device("meta"):
        backbone = create_backbone(name, dense=dense)
    layers = {n: backbone.layer_id(n) for n, _ in backbone.named_parameters()}
    inner = range(backbone.num_layers - 1)  # dense FFNet_seg ends with its blocks
    assert set(inner) <= set(layers.values()) <= {*inner, backbone.num_layers - 1}
    last = {n for n, layer in layers.items() if layer == backbone.num_layers - 1}
    ends = ("norm", "head.", "pyramid.", *backbone.classification_keys)
    assert all(n.startswith(ends) for n in last)
    stages = {backbone.layer_ids.stage(n) for n in layers}
    assert set(range(len(backbone.layer_ids.depths) + 1)) <= stages


@pytest.mark.parametrize(
    ("scope", "constructor", "paramwise"),
    [
        ("mmdet", "LearningRateDecayOptimizerConstructor", {"decay_rate": 0.5, "num_layers": 12}),
        ("mmseg", "LearningRateDecayOptimizerConstructor", {"decay_rate": 0.5}),
        ("mmseg", "LayerDecayOptimizerConstructor", {"layer_decay_rate": 0.5, "num_layers": 12}),
        ("mmpretrain", "LearningRateDecayOptimWrapperConstructor", {"layer_decay_rate": 0.5}),
    ],
)
def test_the_toolkits_layer_decay_asks_the_backbone(scope, constructor, paramwise):
    model = nn.Module()
    model.backbone, model.neck = build("swin_t", scope), nn.Linear(2, 2)
    model.get_layer_depth = lambda name: model.backbone.get_layer_depth(name, "backbone.")
    wrapper = {
        "type": "OptimWrapper", "constructor": constructor, "paramwise_cfg": dict(paramwise),
        "optimizer": {"type": "AdamW", "lr": 1.0, "weight_decay": 0.1},
    }  # fmt: skip
    with DefaultScope.overwrite_default_scope(scope):
        groups = build_optim_wrapper(model, wrapper).optimizer.param_groups
    rates = {id(p): group["lr"] for group in groups for p in group["params"]}
    assert len(rates) == len(list(model.parameters()))
    by_class = OPTIM_WRAPPER_CONSTRUCTORS.get(f"{scope}.{constructor}")
    wrapper |= {"constructor": by_class, "paramwise_cfg": paramwise}
    again = build_optim_wrapper(model, wrapper)
    assert [group["lr"] for group in again.optimizer.param_groups] == [g["lr"] for g in groups]
    for name, parameter in model.named_parameters():
        own = name.removeprefix("backbone.")
        layer = model.backbone.layer_id(own) if own != name else 13
        assert rates[id(parameter)] == pytest.approx(0.5 ** (13 - layer)), name


@pytest.mark.parametrize(
    ("to", "name"),
    rest_slow_pairs(
        [("mmseg", "poolformer_s12_glu"), ("mmdet", "swin_t_afbo"), ("mmpretrain", "deit_t_iffn"),
         *by_turns(*TOOLKITS)],
        [("mmseg", "poolformer_s12_glu")],
    ),
)  # fmt: skip
@torch.no_grad()
def test_backbones_go_to_every_toolkit_and_back(tmp_path, name, to):
    """The command itself compares the outputs; this checks its files."""
    folder = run_export(tmp_path, f"backbone={name}", f"to={to}", SIZE)
    dense = to != "mmpretrain"
    config = Config.fromfile(folder / "config.py")
    theirs = build(**config.model.backbone, name=config.model.backbone.pop("type"), scope=to).eval()
    theirs.init_weights()
    expected = theirs(images())
    for suffix in ("pth", "safetensors"):
        back = create_backbone(name, dense=dense, pretrained=folder / f"{name}.{suffix}").eval()
        found = back(images()) if dense else (back.embed(images()),)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert f"{to}" in (folder / "README.md").read_text()


def run_readme(folder, picture=None):
    """Run the Python lines of a folder's README as a separate script."""
    if picture is not None:
        shutil.copy(picture, folder / "image.jpg")
    block = (folder / "README.md").read_text().split("```python\n")[1].split("```")[0]
    block = block.replace("<this folder>", str(folder))
    command = [sys.executable, "-W", "ignore", "-c", f"{block}\nprint(type(model).__name__)"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_the_folder_is_whole_or_absent_and_only_an_exports_is_replaced(
    tmp_path, capsys, monkeypatch
):
    out = tmp_path / "out"
    typed = ["backbone=deit_t", "to=mmdet", f"ckpt={tmp_path / 'x.pth'}", f"out={out}"]
    torch.save({"a": torch.zeros(1)}, tmp_path / "x.pth")
    assert export.main(typed) == 2
    assert "does not fit deit_t" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["x.pth"]
    out.mkdir()
    (out / "mine").touch()
    for overwrite in ("false", "true"):
        assert export.main([*typed, f"overwrite={overwrite}"]) == 2
        assert "was not made by an export; pass another out=" in capsys.readouterr().err
        assert (out / "mine").exists()
    out, link = tmp_path / "made", tmp_path / "link"
    with new_folder(out, overwrite=False) as folder:
        (folder / "first").touch()
    with pytest.raises(ValueError, match="exists; pass overwrite=true"):
        new_folder(out, overwrite=False).__enter__()
    with new_folder(out, overwrite=True) as folder:
        (folder / "second").touch()
    assert sorted(path.name for path in out.iterdir()) == [MARK, "second"]
    link.symlink_to(out)
    (tmp_path / "file").touch()
    for other in (link, tmp_path / "file"):
        with pytest.raises(ValueError, match="was not made by an export"):
            new_folder(other, overwrite=True).__enter__()
    monkeypatch.chdir(out)
    for here in (Path(), out, tmp_path):
        with pytest.raises(ValueError, match="contains the current folder"):
            new_folder(here, overwrite=True).__enter__()
    assert (out / "second").exists()


def test_a_foreign_run_folder_is_exported_by_the_closed_list(tmp_path, capsys):
    """Names in its config are checked before any of them is called."""
    config = {
        "task_name": "detection", "seed": 0, "backbone": {"name": "deit_t"},
        "head": {"_target_": "heads.toolkits.detectors.build_detector", "name": "retinanet"},
        "data": {"_target_": "datamodules.dense.voc.require_package", "name": "antigravity"},
        "task": {"_target_": "tasks.detection.task.DetectionTask"},
    }  # fmt: skip
    (tmp_path / "checkpoints").mkdir()
    torch.save({"state_dict": {"model.a": torch.zeros(1)}}, tmp_path / "checkpoints" / "best.ckpt")
    typed = ["to=mmdet", f"ckpt={tmp_path}", f"out={tmp_path / 'out'}"]
    code = {**config, "head": {**config["head"], "options": {"x': 1}\nimport os": 1}}}
    for text, said in (
        (yaml.safe_dump(config), "data._target_=datamodules.dense.voc.require_package is refused"),
        ("x: !!python/object/apply:os.system [echo]", "config.yaml cannot be read"),
        ("a: [", "config.yaml cannot be read"),
        (yaml.safe_dump(code), "has an option named"),
    ):
        (tmp_path / "config.yaml").write_text(text)
        assert export.main(typed) == 2
        assert said in capsys.readouterr().err
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("backbone=deit_t", "to= is missing: pass to=mmdet|mmseg"),
        ("to=timm", "backbone=NAME is missing"),
        ("backbone=dei_t to=mmdet", "did you mean deit_t"),
        ("backbone=deit_t backbone.pretrained=x.pth to=onnx", "pass the file as ckpt="),
        ("backbone=deit_t backbone.dense=true to=timm", "not an export option: each target takes"),
        ("backbone=deit_t to=mmdet ckpt=nowhere", "nowhere does not exist; pass a checkpoint"),
    ],
)
def test_wrong_arguments_name_the_valid_ones(capsys, typed, said):
    assert export.main(typed.split()) == 2
    assert said in capsys.readouterr().err


def test_a_config_inherits_and_names_its_data_once(tmp_path, capsys):
    import mmdet

    folder = run_export(tmp_path, "backbone=poolformer_s12_glu", "to=mmdet", SIZE)
    text = (folder / "config.py").read_text()
    assert text.count("data/coco/") == 1
    assert len(text.splitlines()) < 65
    assert "\noptimizer =" not in text  # the schedule has it in the wrapper alone
    text = text.replace("data/coco/", "/mine/")
    (folder / "config.py").write_text(text)
    config = Config.fromfile(folder / "config.py")
    shipped = Path(mmdet.__file__).parent / ".mim" / "configs" / "_base_"
    copies = list((folder / "_base_").rglob("*.py"))
    assert len(copies) == 4
    for path in copies:
        assert path.read_text() == (shipped / path.relative_to(folder / "_base_")).read_text()
    for split in ("train", "val", "test"):
        assert config[f"{split}_dataloader"].dataset.data_root == "/mine/"
    assert config.val_evaluator.ann_file == "/mine/annotations/instances_val2017.json"
    # Everything else is inherited, without the toolkit's ResNet and SGD.
    assert config.model.roi_head.bbox_head.num_classes == 80
    assert "depth" not in config.model.backbone
    assert set(config.optim_wrapper.optimizer) == {"type", "lr", "betas", "weight_decay"}


@pytest.mark.slow
def test_a_standalone_export_opens_in_a_fresh_interpreter(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # `out` becomes relative for another folder
    typed = ["backbone=deit_t_afbo", "to=mmdet", "standalone=true", "out=alone", SIZE]
    assert export.main(typed) == 0
    folder, copied = tmp_path / "alone", tmp_path / "alone" / "backbones"
    assert (copied / "mixers/afbo").is_dir()
    assert not [*copied.rglob("__pycache__"), *copied.rglob("compiled")]
    # The check imports the folder's own copy.
    (copied / "mm.py").write_text("raise ImportError('changed')")
    with pytest.raises(ValueError, match=r"(?s)the copied package fails: .*changed"):
        check_standalone(folder, folder / "deit_t_afbo.pth", torch.zeros(1, 3, 64, 64), [])


def test_classifier_goes_to_mmpretrain_and_comes_back_trained(tmp_path):
    from mmengine.dataset import default_collate
    from mmengine.runner import Runner
    from mmpretrain.apis import get_model
    from mmpretrain.structures import DataSample

    ours = LinearClassifier(create_backbone("deit_t_glu", img_size=64), 5).eval()
    torch.save(ours.state_dict(), tmp_path / "ours.pth")
    folder = run_export(
        tmp_path, "backbone=deit_t_glu", "backbone.img_size=64",
        f"ckpt={tmp_path / 'ours.pth'}", SIZE, "to=mmpretrain",
    )  # fmt: skip
    config = Config.fromfile(folder / "config.py")
    theirs = get_model(config, pretrained=str(folder / "deit_t_glu.pth"), device="cpu").eval()
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(theirs(x, mode="tensor"), ours(x), rtol=1e-5, atol=1e-5)

    sample = {"inputs": torch.zeros(3, 64, 64, dtype=torch.uint8), "data_samples": DataSample()}
    sample["data_samples"].set_gt_label(1)
    config.model.train_cfg = None
    runner = Runner(
        model=config.model,
        work_dir=str(tmp_path / "work"),
        train_dataloader=DataLoader([sample] * 2, batch_size=2, collate_fn=default_collate),
        train_cfg={"by_epoch": True, "max_epochs": 1},
        optim_wrapper=config.optim_wrapper,
        load_from=str(folder / "deit_t_glu.pth"),
        default_scope="mmpretrain",
    )
    runner.train()
    trained = LinearClassifier.from_pretrained(
        "deit_t_glu", tmp_path / "work" / "epoch_1.pth", img_size=64
    ).eval()
    with torch.no_grad():
        after = runner.model.eval()(x, mode="tensor")
        assert (after - ours(x)).abs().max() > 1e-4  # it has learned
        torch.testing.assert_close(trained(x), after, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_detector_opens_in_mmdet_and_predicts_the_same(tmp_path, capsys, sample_cache):
    from mmdet.apis import inference_detector, init_detector

    folder, ours, batch, picture = train_and_export(
        "detection", "mmdet", tmp_path, capsys, "task.ema={decay: 0.5}"
    )
    assert run_readme(folder, picture) == type(ours.model).__name__
    theirs = init_detector(str(folder / "config.py"), str(folder / f"{TRAINED}.pth"), device="cpu")
    assert theirs.dataset_meta["classes"] == tuple("0123456789")
    for model in (theirs, ours.model):  # after little training all scores are low
        model.test_cfg.rcnn.score_thr = model.roi_head.test_cfg.score_thr = 0.0
    with torch.no_grad():
        before = ours.predict(batch)[0].pred_instances
    after = inference_detector(theirs, picture).pred_instances
    assert len(before) > 10
    for key in ("bboxes", "scores", "labels", "masks"):
        torch.testing.assert_close(after[key], before[key], rtol=1e-5, atol=1e-4)
    back = create_backbone(TRAINED, dense=True, pretrained=folder / f"{TRAINED}.pth")
    assert all(v.equal(ours.backbone.state_dict()[k]) for k, v in back.state_dict().items())


@pytest.mark.slow
def test_segmentor_opens_in_mmseg_and_predicts_the_same(tmp_path, capsys, sample_cache):
    from mmseg.apis import inference_model, init_model

    folder, ours, batch, picture = train_and_export("segmentation", "mmseg", tmp_path, capsys)
    assert run_readme(folder, picture) == type(ours.model).__name__
    theirs = init_model(str(folder / "config.py"), str(folder / f"{TRAINED}.pth"), device="cpu")
    with torch.no_grad():
        before = ours.predict(batch)[0].seg_logits.data
    after = inference_model(theirs, picture).seg_logits.data
    assert np.ptp(after.numpy()) > 0
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)


def train_and_export(task, to, tmp_path, capsys, *more):
    """Train shortly and export; return folder, model, a batch of one image, and its file."""
    from backbones.checkpoints.adoption import adopt
    from backbones.checkpoints.opening import in_memory
    from tasks.engine.instantiate import build as build_part

    typed = arguments(task, tmp_path / "runs", *more, backbone=TRAINED)
    ended = completed(typed, capsys)
    run = ended.folder()
    folder = run_export(tmp_path, f"ckpt={run}", f"to={to}", SIZE)
    config = yaml.safe_load((run / "config.yaml").read_text())
    data = build_part(config["data"], "data", seed=0, predict_path=None)
    data.prepare_data()
    picture = next(path for path in sorted(Path(data.root).rglob("*.jpg")) if "val" in str(path))
    data = build_part(config["data"], "data", seed=0, predict_path=str(picture))
    data.prepare_data()
    data.setup()
    backbone = create_backbone(**config["backbone"])
    model = build_part(config["head"], "head", backbone=backbone, num_classes=data.num_classes)
    content = torch.load(run / "checkpoints" / "best.ckpt", weights_only=True)
    # If there is an average, it was validated.
    adopt(model, in_memory(content.get("state_dict_ema", content["state_dict"]), str(run)))
    return folder, model.eval(), next(iter(data.predict_dataloader())), str(picture)


@pytest.mark.parametrize(
    ("token_mixer", "multipliers"),
    [("afno", {}), ("aggregated", {"backbone": (0.1, 1.0), "query_embed": (1.0, 0.0)}),
     ("window_attention", {"backbone": (0.1, 1.0)})],
)  # fmt: skip
def test_exported_configs_have_the_rates_and_decays_of_runs(token_mixer, multipliers):
    model = nn.Module()
    with torch.device("meta"):
        model.backbone = create_backbone("poolformer_s12", token_mixer=token_mixer, dense=True)
        model.query_embed = nn.Embedding(3, 8)
    model.multipliers = multipliers
    rules = parameter_rules(model, 0.05)
    wrapper = training_config("mmseg", model.backbone, multipliers)["optim_wrapper"]
    wrapper["optimizer"] |= {"lr": 1.0, "weight_decay": 0.05}
    wrapper.pop("clip_grad", None)
    groups = build_optim_wrapper(model, wrapper).optimizer.param_groups
    rates = {id(p): (g["lr"], g["weight_decay"]) for g in groups for p in g["params"]}
    for name, parameter in model.named_parameters():
        expected = (rules[name].lr_scale, rules[name].weight_decay)
        assert rates[id(parameter)] == pytest.approx(expected), name
