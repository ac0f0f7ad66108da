"""Every row with a metric is an experiment: its name, training, model and comparison."""

import functools
import json
import re

import pytest
import torch
import yaml

from backbones import create_backbone
from backbones.analysis.counting import count_parameters
from datamodules import SampleClassification, SampleDetection, SampleSegmentation, SampleTransfer
from tasks.engine.instantiate import build
from tasks.engine.optimisation.optimizer import learning_rate_factor, scaled_lr
from tests.families import rest_slow, rest_slow_pairs
from tests.runs import CONFIGS, completed, composed, options, run_here, write_run
from tools.cli.yaml_files import LOADER
from tools.comparing.paper_figures import compare_with_row, published_test_set
from tools.config import help as run_help
from tools.config import overrides
from tools.config.config_checks import resolve_config
from tools.config.run_config import job_config
from tools.papers import experiment_configs as group
from tools.papers.experiments import describe, experiments, find_experiment
from tools.papers.published import list_papers
from tools.runs import report

ROWS = experiments()
RUNNABLE = [name for name, row in ROWS.items() if not row.train.cannot_run]
CLASSES = {"classification": 1000, "detection": 80, "segmentation": 150, "transfer": 100}
TARGETS = {"super_resolution": {"scale": 4}}
TUNED = ("detection", "segmentation", "transfer")  # from a trained backbone
TOOLKIT = {"detection": "mmdet", "segmentation": "mmseg"}
# One row of each kind of training.
KINDS = {
    (r.task, r.head, r.train.recipe, r.train.protocol, json.dumps(r.train.overrides)): name
    for name in reversed(RUNNABLE)
    if (r := ROWS[name])
}
# A small one of each task and head.
MODELS = (
    "afbo_t7_deit_t_afbo_g1_2_g2_6", "posmlp_t4_posmlp_t_groups_4_8_16_32",
    "sbm_t2_deit_b_linear_probe", "afbo_t4_poolformer_s12_afbo_retinanet", "iffn_t7_swin_t_iffn",
    "ffnet_t2_ffnet_2", "ffnet_t3_ffnet_seg_ade20k", "iffn_t8_swin_t_iffn",
)  # fmt: skip
AFBO = "afbo_t2_deit_t_afbo"


def test_every_row_with_a_metric_has_a_name_of_its_own_and_is_in_the_help():
    """The rows are counted in the files themselves."""
    counted = 0
    for paper in list_papers():
        text = (CONFIGS / "published" / f"{paper}.yaml").read_text()
        rows = yaml.load(text, LOADER)["rows"]
        counted += sum(bool(row.get("metrics")) for row in rows)
    assert len(ROWS) == counted > 300
    for name, row in ROWS.items():
        assert re.fullmatch(rf"{row.paper}_t{row.table}_{row.backbone}(_\w+)?", name)
    said = run_help.help_text(["experiment"]).splitlines()
    assert {line.split()[0] for line in said if line[0] != " "} == set(ROWS)
    assert f"{'afbo_t2_deit_t_afbo':52} 74.6 % top-1 (AFBO Table 2)" in said
    assert describe(ROWS["iffn_t7_swin_t"]) == "46.0 box AP"
    assert sum("cannot run: " in line for line in said) == len(ROWS) - len(RUNNABLE)


@pytest.mark.parametrize(
    ("typed", "nearest"),
    [("afbo_deit_t_afbo", "afbo_t1_deit_t_afbo"), ("ffnet_1", "ffnet_t1_ffnet_1"),
     ("afbo_t2_deit_t_abfo", "afbo_t2_deit_t_afbo"), ("iffn_t7_swint_iffn", "iffn_t7_swin_t_iffn")],
)  # fmt: skip
def test_a_misspelt_name_suggests_the_nearest(typed, nearest, capsys):
    ended = run_here([f"experiment={typed}"], capsys)
    assert ended.status == 2
    assert re.match(rf"error: unknown experiment '{typed}'; did you mean ", ended.err)
    assert nearest in ended.err
    assert ended.err.count("\n") == 1


@pytest.mark.parametrize("name", [name for name in ROWS if name not in RUNNABLE])
def test_a_row_that_cannot_run_gives_the_reason(name, capsys):
    reason = ROWS[name].train.cannot_run
    ended = run_here([f"experiment={name}", "data.root=/data"], capsys)
    assert ended.status == 2
    assert ended.err == f"error: experiment={name} cannot run: {reason}\n"
    assert len(reason) > 30


def test_rows_name_configs_and_start_from_their_own_backbone_on_imagenet():
    groups = {group: (None, *options(group)) for group in ("data", "recipe", "trainer")}
    for name in RUNNABLE:
        row, start = ROWS[name], ROWS[name].train.start
        assert all(getattr(row.train, group) in known for group, known in groups.items()), name
        assert None not in (row.train.data, row.train.trainer), name
        dense = row.task in TUNED and not row.backbone.startswith("resnet")
        assert bool(start) == (dense or name.endswith("_384")), name
        if start and start.startswith("experiment="):
            first = find_experiment(start.removeprefix("experiment="))
            assert first.name in RUNNABLE
            assert (first.backbone, first.task) == (row.backbone, "classification")
            assert {**first.options, "fused": None} == {**row.options, "fused": None}
        elif start:
            assert f"backbone={row.backbone}" in start.split()


def check_config(name):
    row, config = ROWS[name], composed(f"experiment={name}", "data.root=/data")
    assert (config.task_name, config.backbone["name"]) == (row.task, row.backbone)
    assert config.data["_target_"] == published_test_set(row)[0]
    assert config.paper == {"name": row.paper, "table": row.table, "experiment": name}
    assert config.head.get("name") == row.head
    assert config.trainer["strategy"] == row.train.trainer
    if row.task == "classification":
        assert config.data["image_size"] == config.backbone["img_size"] == row.image_size
    for key, value in row.options.items():
        own = config.backbone[key]
        if key not in group.UNTRAINED:
            assert own | value == own if isinstance(value, dict) else own == value, key
    return config


@pytest.mark.parametrize("name", rest_slow(RUNNABLE, list(KINDS.values())[::3]))
def test_every_row_composes(name):
    check_config(name)


COUNTED = [one for one in RUNNABLE if ROWS[one].task in (*CLASSES, *TARGETS)]


@pytest.mark.parametrize("name", rest_slow(COUNTED, MODELS))
def test_every_model_has_the_parameters_of_its_row(name):
    row = ROWS[name]
    if row.task in TOOLKIT:
        pytest.importorskip(TOOLKIT[row.task])
    config = check_config(name)
    targets = TARGETS.get(row.task) or {"num_classes": row.classes or CLASSES[row.task]}
    with torch.device("meta"):
        backbone = create_backbone(**config.backbone)
        count = count_parameters(build(config.head, "head", backbone=backbone, **targets))
    if row.task == "transfer":  # the row counts ImageNet's 1000 classes
        count += (1000 - 100) * (backbone.num_features + 1)
    assert row.options.get("fused") or count == row.params


# One of each kind of a table's overrides, and dense rows: optimiser, schedule, drop path, crops,
# decay of layers and heads.
STATED = {
    "posmlp_t1_posmlp_t_sgu": {
        "data.train_share": 0.5, "optimizer.lr": 1.6e-3, "trainer.max_epochs": 130,
        "schedule.cooldown": 10,
    },
    "ffnet_t1_ffnet_2_distilled": {
        "backbone.drop_path_rate": 0.08, "task.mixup.mixup_alpha": 0.8,
        "task.distillation.type": "hard", "task.distillation.alpha": 0.5,
        "task.distillation.teacher": "regnety_160.deit_in1k",
        "task.distillation.image_size": None,  # the authors' teacher sees 256 pixels
    },
    "ffnet_t1_ffnet_3_384": {
        "optimizer.lr": 5e-6, "schedule.name": "constant", "backbone.img_size": 384,
    },
    "iffn_t7_swin_t_iffn": {"trainer.max_epochs": 36, "schedule.milestones": [27, 33]},
    "sbm_t2_sbm_b_finetune": {"optimizer.lr": 5e-6, "trainer.max_epochs": 1000},
    "ffnet_t2_ffnet_4": {
        "head.name": "cascade_mask_rcnn_4conv", "task.ema": {"decay": 0.9999},
        "backbone.drop_path_rate": 0.6, "optimizer.layer_decay": 0.8,
        "schedule.milestones": [27, 33], "trainer.max_epochs": 36, "data.train_crops": True,
        "trainer.sync_batchnorm": True,
    },
    "ffnet_t3_ffnet_seg_ade20k": {
        "backbone.drop_path_rate": 0.3, "optimizer.lr": 6e-5, "head.model.decode_head.depth": 3,
        "head.pad_to": 512, "data.crop_size": 512, "schedule.warmup_within": True,
    },
    "afbo_t4_poolformer_s12_afbo_retinanet": {
        "optimizer.groups": [{"match": "*", "weight_decay": 1e-4}],
    },
}  # fmt: skip


@pytest.mark.parametrize("name", STATED)
def test_the_settings_that_papers_state(name):
    config = composed(f"experiment={name}", "data.root=/data")
    for key, value in STATED[name].items():
        assert functools.reduce(dict.__getitem__, key.split("."), config.plain()) == value, key
    if name == "ffnet_t3_ffnet_seg_ade20k":
        groups = {group["match"]: group for group in config.optimizer["groups"]}
        assert groups["decode_head.*"]["lr_scale"] == 10
        assert {group["weight_decay"] for group in groups.values()} == {0.05}


SAMPLE = {task: f"sample_{task}" for task in {row.task for row in ROWS.values()}}
OTHER = SAMPLE | {"classification": "cifar100", "transfer": "folder",
                  "segmentation": "segmentation_folder", "point_segmentation": "s3dis",
                  "super_resolution": "image_folder", "forecasting": "csv",
                  "generation": "image_generation", "glue": "rte"}  # fmt: skip
REAL = ("data.root=/data", "backbone.pretrained=false")
CHANGES = {
    "sample": lambda row: [f"data={SAMPLE[row.task]}"],
    "small batch": lambda row: [f"data={SAMPLE[row.task]}", "data.batch_size=2"],
    "other data": lambda row: [f"data={OTHER[row.task]}", *REAL],
    "no recipe": lambda row: ["recipe=null", *REAL],
    "sample, no recipe": lambda row: [f"data={SAMPLE[row.task]}", "recipe=null"],
    "drop path": lambda row: ["backbone.drop_path_rate=0.15", *REAL],
    "one epoch": lambda row: ["trainer.max_epochs=1", *REAL],
    "short on sample": lambda row: [f"data={SAMPLE[row.task]}", "trainer.max_epochs=2"],
    "steps": lambda row: ["trainer.max_steps=3", *REAL],
    "few batches": lambda row: ["trainer.limit_train_batches=3", *REAL],
    "random weights": lambda row: ["data.root=/data", "backbone.pretrained=null"],
}
# One of each task, and special ones: half of ImageNet, label maps, a teacher, 384 pixels,
# long cool-downs, probing, frozen layers, SyncBN, windows.
DRAW = (
    "afbo_t2_lvt_r2", "posmlp_t1_posmlp_t_sgu", "ffnet_t1_ffnet_1_distilled",
    "ffnet_t1_ffnet_3_384", "sbm_t2_sbm_b_finetune", "afbo_t17_swin_t",
    "iffn_t7_swin_t_iffn", "ffnet_t3_ffnet_seg_cityscapes",
)  # fmt: skip


# Every kind of training with some of the changes, by turns; those of the draw with all.
TURNS = [
    (name, change)
    for row, name in enumerate(dict.fromkeys((*DRAW, *KINDS.values())))
    for turn, change in enumerate(CHANGES)
    if name in DRAW or (row + turn) % 4 == 0
]


def prepare_config(name, *typed):
    """Compose and check a command's config, as a run does before it builds anything."""
    given = overrides.read_command([f"experiment={name}", *typed])
    return resolve_config(job_config(given.words, given.config))


def check_built(config):
    """Check that a config's data can be built, and that its schedule gives rates on one device."""
    build(config.data, "data", seed=0, predict_path=None)
    optimizer, trainer = config.optimizer, config.trainer
    if trainer["devices"] == 1:
        batch = config.data["batch_size"]
        top = scaled_lr(optimizer["lr"], optimizer.get("reference_batch"), batch)
        epochs = trainer["max_epochs"]
        steps = 4 * epochs if epochs > 0 else trainer["max_steps"]
        factor = learning_rate_factor(steps, 4, top, **config.schedule)
        assert all(0 <= factor(step) <= 1.0001 for step in (0, steps // 2, steps - 1))
    return config


@pytest.mark.parametrize(
    ("name", "change"),
    rest_slow_pairs(
        TURNS,
        [*((name, change) for name in DRAW[::3] for change in CHANGES),
         *((name, "short on sample") for name in DRAW)],
    ),
)  # fmt: skip
def test_a_row_with_changes_composes(name, change):
    config = check_built(prepare_config(name, *CHANGES[change](ROWS[name])))
    assert config.paper["experiment"] == name
    if "sample" in change:
        assert config.data["_target_"].rpartition(".")[2].startswith("Sample")
        assert (config.trainer["devices"], config.trainer["strategy"]) == (1, "auto")
    if "sample" in change and name in DRAW:  # the rows of a ResNet start from timm's weights
        assert config.backbone["pretrained"] in (None, False)
        assert config.data.get("token_labels") is None


def test_settings_that_do_not_fit_other_data_are_dropped_and_named(caplog):
    caplog.set_level("INFO")
    half = prepare_config("posmlp_t1_posmlp_t_sgu", "data=cifar100", "data.root=/d", "trainer=cpu")
    assert "train_share" not in half.data
    assert "data.train_share=0.5 is left out: it belongs to data=imagenet" in caplog.text
    labelled = prepare_config("afbo_t2_lvt_r2", "data=sample_classification")
    assert labelled.data["token_labels"] is None
    assert (
        "data.token_labels=null, because the label maps belong to the row's images" in caplog.text
    )
    own = prepare_config("afbo_t2_lvt_r2", "data.root=/data", "data.token_labels=null")
    # The row's augmentation without options that only the sample data's has.
    assert labelled.data["augmentation"] == own.data["augmentation"]
    dense = prepare_config("iffn_t7_swin_t_iffn", "data=sample_detection")
    assert dense.backbone["pretrained"] is False
    assert "starts from random weights, because the data differs from the row's" in caplog.text
    assert dense.data["train_sizes"][0] == [1333, 480]  # the row's value is kept


def summary(name, images=50000, **metrics):
    found = {"metrics": metrics, "parameters": ROWS[name].params}
    return {**found, "data": {"samples": {"val": images}}}


def compared(name, *typed, images=50000, **metrics):
    """Compare the figures of a composed experiment with its row."""
    return compare_with_row(
        composed(f"experiment={name}", *typed), summary(name, images, **metrics)
    )


def test_a_run_of_a_row_is_compared_with_the_paper():
    found = compared(AFBO, "data.root=/data/imagenet", top1=74.1)
    assert found["row"] == "AFBO Table 2"
    assert "why_not" not in found
    assert found["metrics"]["top1"] == {"paper": 74.6, "ours": 74.1,
                                        "difference": pytest.approx(-0.5)}  # fmt: skip
    shown = report.compare_with_paper({"paper": found})
    assert shown == {"AFBO Table 2, top1": "paper 74.6, ours 74.1, difference -0.5"}
    assert compare_with_row(composed("backbone=deit_t"), summary("iffn_t1_deit_t", top1=1)) is None
    maps = compared("afbo_t2_lvt_r2", "data.root=/d", "data.token_labels=/maps", top1=74.0)
    assert "why_not" not in maps
    name = "posmlp_t8_posmlp_t_mask_rcnn"
    config = composed(f"experiment={name}", "data.root=/data", "backbone.pretrained=/w.ckpt")
    config.backbone["pretrained"] = "/w.ckpt"
    found = compare_with_row(config, summary(name, 5000, AP=0.42, mask_AP=0.38))["metrics"]
    assert found["AP"]["difference"] == pytest.approx(0.42 - 0.416)
    assert found["mask_AP"]["difference"] == pytest.approx(0.38 - 0.384)


# What the rows print, in our units.
PRINTED = {
    "iffn_t1_deit_t": 72.2, AFBO: 74.6, "iffn_t7_swin_t_iffn": 0.46, "iffn_t8_swin_t": 44.5,
    "afbo_t2_lvt_r2": 74.8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "typed", "metrics", "reason"),
    [
        ("iffn_t1_deit_t", ["trainer.max_epochs=9"], {"top1": 10.0},
         "trainer.max_epochs=9 instead of 300"),
        ("iffn_t1_deit_t", [], {"top1": 10.0, "images": 200},
         "200 test images instead of 50000, so the data differs"),
        ("iffn_t1_deit_t", ["data.root={cache}/classification"], {"top1": 10.0},
         "trained on sample data"),
        (AFBO, ["backbone.drop_path_rate=0.3"], {"top1": 70.0},
         "backbone.drop_path_rate=0.3 instead of 0.1"),
        (AFBO, ["data=cifar100"], {"top1": 70.0},
         "made on CIFAR100DataModule, not on the paper's data"),
        (AFBO, ["backbone=deit_s_afbo"], {"top1": 70.0},
         "backbone=deit_s_afbo instead of deit_t_afbo"),
        ("iffn_t8_swin_t", [], {"mIoU": 9.0, "images": 2000}, "trained from random weights"),
        ("iffn_t7_swin_t_iffn", ["head=retinanet"], {"AP": 0.1}, ""),
        ("afbo_t2_lvt_r2", ["data.token_labels=null"], {"top1": 74.0},
         "data.token_labels=None instead of required"),
    ],
)  # fmt: skip
def test_a_changed_row_is_shown_but_not_compared(
    name, typed, metrics, reason, monkeypatch, tmp_path
):
    monkeypatch.setenv("MIXERLAB_CACHE", str(tmp_path))
    typed = [one.format(cache=tmp_path) for one in ("data.root=/data", *typed)]
    found = compared(name, *typed, **metrics)
    figure = next(iter(metrics))
    assert found["metrics"][figure] == {"paper": PRINTED[name], "ours": metrics[figure]}
    assert found["why_not"]
    assert reason in found["why_not"]
    assert report.compare_with_paper({"paper": found})["does not compare"] == found["why_not"]


@pytest.mark.parametrize("epochs", [300, 9])
def test_an_evaluation_compares_the_training_in_its_folder(epochs, tmp_path):
    name = "afbo_t2_deit_t"
    trained = composed(f"experiment={name}", "data.root=/data", f"trainer.max_epochs={epochs}")
    config = composed("mode=test", f"ckpt={write_run(tmp_path, trained)}", "trainer=cpu")
    found = compare_with_row(config, summary(name, top1=72.0))
    if epochs == 300:
        assert found["metrics"]["top1"]["difference"] == pytest.approx(-0.2)
    else:
        assert "trainer.max_epochs=9 instead of 300" in found["why_not"]


STAND_INS = {
    "classification": (SampleClassification, {"digits_per_class": 4, "train_copies": 1}),
    "transfer": (SampleTransfer, {"train_per_class": 1, "val_per_class": 1}),
    "detection": (SampleDetection, {"num_train": 2, "num_val": 1}),
    "segmentation": (SampleSegmentation, {"num_train": 4, "num_val": 1}),
}
DRAWN = (
    AFBO, "sbm_t2_deit_b_linear_probe", "iffn_t7_swin_t_iffn", "ffnet_t3_ffnet_seg_ade20k",
)  # fmt: skip


@pytest.mark.slow  # a minute each, classifiers at the papers' image sizes
@pytest.mark.parametrize("name", DRAWN)
def test_a_row_trains_two_steps_on_data_in_the_real_layout(name, sample_cache, tmp_path, capsys):
    task = ROWS[name].task
    kind, sizes = STAND_INS[task]
    data = kind(sample_cache, **sizes)
    data.prepare_data()
    typed = [f"experiment={name}", f"data.root={data.root}", "trainer=cpu", "data.num_workers=0",
             f"data.batch_size={1 if task == 'detection' else 2}", "data.eval_batch_size=2",
             "trainer.max_steps=2",
             "trainer.limit_val_batches=1", "backbone.pretrained=false",
             "optimizer.reference_batch=null", f"output_dir={tmp_path}"]  # fmt: skip
    if task == "detection":  # at 800 x 1333 a step takes 10 GB
        typed.append("data.scale=[666,400]")
    if task == "segmentation":  # nor at 512 x 512
        typed += ["data.scale=[1024,256]", "data.crop_size=256"]
    ended = completed(typed, capsys)
    assert "does not compare" in ended.out
    (folder,) = tmp_path.glob("*/*/2*")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["paper"]["experiment"] == name
    assert summary["paper"]["why_not"].startswith("trained on sample data")
    assert all(figures["paper"] > 0 for figures in summary["paper"]["metrics"].values())
    assert set(summary["paper"]["metrics"]) & set(summary["metrics"])
    typed = ["mode=test", f"ckpt={folder}", f"output_dir={tmp_path}", "trainer=cpu"]
    ended = completed([*typed, "trainer.limit_val_batches=1"], capsys)
    assert "does not compare" in ended.out
