"""Every row with a metric is an experiment: its name, training, model and comparison."""

import json
import re

import pytest
import torch
import yaml

from backbones import create_backbone
from backbones.analysis.counting import count_parameters
from datamodules.sample.datamodules import (
    SampleClassification,
    SampleDetection,
    SampleSegmentation,
    SampleTransfer,
)
from tasks.classification.family import FAMILY
from tasks.engine.instantiate import build
from tasks.engine.loading import check_options
from tasks.engine.optim import learning_rate_factor, scaled_lr
from tests.runs import CONFIGS, composed, options, run_here
from tools.cli import processes
from tools.cli.yaml_files import LOADER, read_yaml
from tools.comparing.paper_figures import compare_with_row, published_test_set
from tools.config import changed_rows, overrides
from tools.config import experiment_configs as group
from tools.config import help as run_help
from tools.config.config_checks import resolve_config
from tools.config.lazy_groups import register_groups
from tools.config.run_config import job_config
from tools.papers import published
from tools.papers.experiments import describe, experiments, find_experiment
from tools.papers.published import list_papers, load_rows
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
    "afbo_t7_deit_t_afbo_g1_2_g2_6",
    "posmlp_t4_posmlp_t_groups_4_8_16_32",
    "sbm_t2_deit_b_linear_probe",
    "afbo_t4_poolformer_s12_afbo_retinanet",
    "iffn_t7_swin_t_iffn",
    "ffnet_t2_ffnet_2",
    "ffnet_t3_ffnet_seg_ade20k",
    "iffn_t8_swin_t_iffn",
)


@pytest.fixture(scope="module", autouse=True)
def _experiments_are_options():
    register_groups()


def others_slow(names, *fast):
    return [pytest.param(n, marks=() if n in fast else pytest.mark.slow) for n in names]


def test_rows_are_read_only_where_an_experiment_is_typed(monkeypatch):
    read = []
    monkeypatch.setattr(published, "read_yaml", lambda path: read.append(path) or read_yaml(path))
    experiments.cache_clear()
    for typed in (["task=detection"], ["recipe=deit", "data=imagenet", "data.root=/data"]):
        command = overrides.read_command(typed)
        resolve_config(job_config(command.overrides, command.config))
    assert not read
    overrides.read_command(["experiment=afbo_t2_deit_t_afbo", "data.root=/data"])
    assert len(read) == len(list_papers())


def test_every_row_with_a_metric_has_a_name_of_its_own():
    """The rows are counted in the files themselves."""
    counted = 0
    for paper in list_papers():
        text = (CONFIGS / "published" / f"{paper}.yaml").read_text()
        rows = yaml.load(text, LOADER)["rows"]
        counted += sum(bool(row.get("metrics")) for row in rows)
    assert len(ROWS) == counted > 300
    for name, row in ROWS.items():
        assert re.fullmatch(rf"{row.paper}_t{row.table}_{row.backbone}(_\w+)?", name)


@pytest.mark.parametrize(
    ("paper", "table", "backbone", "names"),
    [
        ("afbo", 2, "deit_t_afbo", ["afbo_t2_deit_t_afbo"]),
        ("posmlp", 8, "posmlp_s",
         ["posmlp_t8_posmlp_s_mask_rcnn", "posmlp_t8_posmlp_s_retinanet"]),
        ("sbm", 5, "sbm_t",
         ["sbm_t5_sbm_t", "sbm_t5_sbm_t_use_linear_false", "sbm_t5_sbm_t_use_bilinear_false",
          "sbm_t5_sbm_t_use_gate_false"]),
        ("ffnet", 1, "ffnet_3",
         ["ffnet_t1_ffnet_3", "ffnet_t1_ffnet_3_384", "ffnet_t1_ffnet_3_distilled"]),
        ("sbm", 2, "sbm_b", ["sbm_t2_sbm_b_finetune", "sbm_t2_sbm_b_linear_probe"]),
        ("iffn", 3, "deit_t", ["iffn_t3_deit_t"]),
    ],
)  # fmt: skip
def test_names_can_be_guessed(paper, table, backbone, names):
    found = [row.name for row in load_rows(paper) if (row.table, row.backbone) == (table, backbone)]
    assert found == names


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


def test_help_lists_all_with_what_the_paper_reports():
    said = run_help.help_text(["experiment"]).splitlines()
    assert {line.split()[0] for line in said if line[0] != " "} == set(ROWS)
    assert f"{'afbo_t2_deit_t_afbo':52} 74.6 % top-1 (AFBO Table 2)" in said
    assert describe(ROWS["iffn_t7_swin_t"]) == "46.0 box AP"
    assert sum("cannot run: " in line for line in said) == len(ROWS) - len(RUNNABLE)


@pytest.mark.parametrize("name", [name for name in ROWS if name not in RUNNABLE])
def test_a_row_that_cannot_run_gives_the_reason(name, capsys):
    reason = ROWS[name].train.cannot_run
    ended = run_here([f"experiment={name}", "data.root=/data"], capsys)
    assert ended.status == 2
    assert ended.err == f"error: experiment={name} cannot run: {reason}\n"
    assert len(reason) > 30


def test_a_pattern_skips_rows_that_cannot_run():
    prepared = overrides.process_arguments(
        ["-m", "experiment=posmlp_t2_posmlp_t*", "data.root=/data"]
    )
    names = prepared[1].partition("=")[2].split(",")
    assert names == ["posmlp_t2_posmlp_t"]
    assert find_experiment("posmlp_t2_posmlp_t_384").train.cannot_run


def test_names_in_rows_exist():
    for name in RUNNABLE:
        train = ROWS[name].train
        assert train.data in options("data"), name
        assert train.recipe in (None, *options("recipe")), name
        assert train.trainer in options("trainer"), name


def test_rows_start_from_their_own_backbone_on_imagenet():
    for name in RUNNABLE:
        row, start = ROWS[name], ROWS[name].train.start
        dense = row.task in TUNED and not row.backbone.startswith("resnet")
        assert bool(start) == (dense or name.endswith("_384")), name
        if start and start.startswith("experiment="):
            first = find_experiment(start.removeprefix("experiment="))
            assert first.name in RUNNABLE
            assert (first.backbone, first.task) == (row.backbone, "classification")
            assert {**first.options, "fused": None} == {**row.options, "fused": None}
        elif start:
            assert f"backbone={row.backbone}" in start.split()


def test_rows_require_the_weights_they_start_from(capsys):
    ended = run_here(["experiment=iffn_t7_swin_t_iffn", "data.root=/data", "trainer=cpu"], capsys)
    assert ended.status == 2
    assert "starts from trained weights" in ended.err
    assert "python tools/run.py experiment=iffn_t1_swin_t_iffn\n" in ended.err


def check_config(name):
    row, config = ROWS[name], composed(f"experiment={name}", "data.root=/data")
    assert (config["task_name"], config["backbone"]["name"]) == (row.task, row.backbone)
    assert config["data"]["_target_"] == published_test_set(row)[0]
    assert config["paper"] == {"name": row.paper, "table": row.table, "experiment": name}
    assert config["head"].get("name") == row.head
    assert config["trainer"]["strategy"] == row.train.trainer
    if row.task == "classification":
        assert config["data"]["image_size"] == config["backbone"]["img_size"] == row.image_size
    for key, value in row.options.items():
        own = config["backbone"][key]
        if key not in group.UNTRAINED:
            assert own | value == own if isinstance(value, dict) else own == value, key
    return config


@pytest.mark.parametrize("name", others_slow(RUNNABLE, *list(KINDS.values())[::3]))
def test_every_row_composes(name):
    check_config(name)


@pytest.mark.parametrize(
    "name", others_slow([one for one in RUNNABLE if ROWS[one].task in CLASSES], *MODELS)
)
def test_every_model_has_the_parameters_of_its_row(name):
    row = ROWS[name]
    if row.task in TOOLKIT:
        pytest.importorskip(TOOLKIT[row.task])
    config = check_config(name)
    with torch.device("meta"):
        backbone = create_backbone(**config["backbone"])
        targets = TARGETS.get(row.task) or {"num_classes": row.classes or CLASSES[row.task]}
        model = build(config, "head", backbone=backbone, **targets)
    count = count_parameters(model)
    if row.task == "transfer":
        count += (1000 - 100) * (
            backbone.num_features + 1
        )  # the count is for ImageNet's 1000 classes
    if not row.options.get("fused"):
        assert count == row.params


def test_the_settings_that_papers_state():
    """One of each kind of a table's overrides."""
    half = composed("experiment=posmlp_t1_posmlp_t_sgu", "data.root=/data")
    assert (half["data"]["train_share"], half["optimizer"]["lr"]) == (0.5, 1.6e-3)
    assert (half["trainer"]["max_epochs"], half["schedule"]["cooldown"]) == (130, 10)
    taught = composed("experiment=ffnet_t1_ffnet_2_distilled", "data.root=/data")
    assert taught["backbone"]["drop_path_rate"] == 0.08
    assert taught["task"]["mixup"]["mixup_alpha"] == 0.8
    distillation = taught["task"]["distillation"]
    assert (distillation["type"], distillation["alpha"]) == ("hard", 0.5)
    assert distillation["teacher"] == "regnety_160.deit_in1k"
    assert distillation["image_size"] is None  # the authors' teacher sees 256 pixels
    larger = composed("experiment=ffnet_t1_ffnet_3_384", "data.root=/data")
    assert (larger["optimizer"]["lr"], larger["schedule"]["name"]) == (5e-6, "constant")
    assert larger["backbone"]["img_size"] == 384
    longer = composed("experiment=iffn_t7_swin_t_iffn", "data.root=/data")
    assert (longer["trainer"]["max_epochs"], longer["schedule"]["milestones"]) == (36, [27, 33])
    tuned = composed("experiment=sbm_t2_sbm_b_finetune", "data.root=/data")
    assert (tuned["optimizer"]["lr"], tuned["trainer"]["max_epochs"]) == (5e-6, 1000)


def test_the_settings_of_dense_rows_equal_those_of_the_specs():
    """Optimiser, schedule, drop path, crops, decay of layers and heads, as in the papers."""
    cascade = composed("experiment=ffnet_t2_ffnet_4", "data.root=/data")
    assert cascade["head"]["name"] == "cascade_mask_rcnn_4conv"
    assert cascade["task"]["ema"] == {"decay": 0.9999}
    assert (cascade["backbone"]["drop_path_rate"], cascade["optimizer"]["layer_decay"]) == (
        0.6,
        0.8,
    )
    assert (cascade["schedule"]["milestones"], cascade["trainer"]["max_epochs"]) == ([27, 33], 36)
    assert cascade["data"]["train_crops"]
    assert cascade["trainer"]["sync_batchnorm"]
    seg = composed("experiment=ffnet_t3_ffnet_seg_ade20k", "data.root=/data")
    assert (seg["backbone"]["drop_path_rate"], seg["optimizer"]["lr"]) == (0.3, 6e-5)
    assert seg["head"]["model"]["decode_head"]["depth"] == 3
    assert seg["head"]["pad_to"] == seg["data"]["crop_size"] == 512
    assert seg["schedule"]["warmup_within"]
    groups = {group["match"]: group for group in seg["optimizer"]["groups"]}
    assert groups["decode_head.*"]["lr_scale"] == 10
    assert {group["weight_decay"] for group in groups.values()} == {0.05}
    pool = composed("experiment=afbo_t4_poolformer_s12_afbo_retinanet", "data.root=/data")
    assert pool["optimizer"]["groups"] == [{"match": "*", "weight_decay": 1e-4}]


# With changes

SAMPLE = {
    "classification": "sample_classification",
    "transfer": "sample_transfer",
    "detection": "sample_detection",
    "segmentation": "sample_segmentation",
    "super_resolution": "sample_super_resolution",
}
OTHER = {
    "classification": "cifar100",
    "transfer": "folder",
    "detection": "sample_detection",
    "segmentation": "segmentation_folder",
    "super_resolution": "image_folder",
}
# Unpublished settings, by row.
MISSING = {
    "posmlp_t2_posmlp_t_384": "recipe=deit_384",
    "posmlp_t2_posmlp_b": "backbone.drop_path_rate=0.3",
}
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


def prepare_config(name, *typed):
    """Compose and check a command's config, as a run does before it builds anything."""
    given = overrides.read_command([f"experiment={name}", *typed])
    config = resolve_config(job_config(given.overrides, given.config))
    check_options(config)
    return config


def check_built(config):
    """Check that a config's data can be built, and that its schedule gives rates on one device."""
    build(config, "data", seed=0, predict_path=None)
    optimizer, trainer = config["optimizer"], config["trainer"]
    if trainer["devices"] == 1:
        batch = config["data"]["batch_size"]
        top = scaled_lr(optimizer["lr"], optimizer.get("reference_batch"), batch)
        steps = 4 * trainer["max_epochs"]
        factor = learning_rate_factor(steps, 4, top, **config["schedule"])
        assert all(0 <= factor(step) <= 1.0001 for step in (0, steps // 2, steps - 1))
    return config


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", others_slow(KINDS.values(), *DRAW[::3]))
def test_a_row_with_changes_composes(name, change):
    config = check_built(prepare_config(name, *CHANGES[change](ROWS[name])))
    assert config["paper"]["experiment"] == name
    if "sample" in change:
        assert (config["trainer"]["devices"], config["trainer"]["strategy"]) == (1, "auto")


@pytest.mark.parametrize("name", DRAW)
def test_each_special_row_trains_on_sample_data(name):
    config = check_built(
        prepare_config(name, f"data={SAMPLE[ROWS[name].task]}", "trainer.max_epochs=2")
    )
    assert config["data"]["_target_"].startswith("datamodules.sample.datamodules.")
    assert config["backbone"]["pretrained"] in (None, False)
    assert config["data"].get("token_labels") is None


@pytest.mark.parametrize("change", ["sample", "one epoch", "steps", "few batches"])
@pytest.mark.parametrize("name", MISSING)
def test_a_row_that_lacks_a_setting_runs_with_it(name, change):
    config = check_built(prepare_config(name, MISSING[name], *CHANGES[change](ROWS[name])))
    assert config["data"]["image_size"] == ROWS[name].image_size
    if name == "posmlp_t2_posmlp_b":
        assert config["backbone"]["drop_path_rate"] == 0.3
    with pytest.raises(ValueError, match="cannot run"):
        prepare_config(name, *CHANGES[change](ROWS[name]))


def test_rows_that_lack_a_setting_are_all_tried():
    assert MISSING.keys() == ROWS.keys() - set(RUNNABLE)
    for name, typed in MISSING.items():
        assert typed.partition("=")[0] in ROWS[name].train.needs
    typed = ["-m", "experiment=posmlp_t2_posmlp_*", MISSING["posmlp_t2_posmlp_b"], "data.root=/d"]
    assert "posmlp_t2_posmlp_b" in overrides.process_arguments(typed)[1].partition("=")[2].split(
        ","
    )


def test_a_shorter_warm_up_is_in_proportion(caplog):
    caplog.set_level("INFO")
    config = prepare_config("afbo_t2_poolformer_s12", "trainer.max_epochs=3", "data.root=/data")
    own = prepare_config("afbo_t2_poolformer_s12", "data.root=/data")
    assert (own["schedule"]["warmup"], own["schedule"]["cooldown"]) == (5, 10)
    share = 3 / own["trainer"]["max_epochs"]
    assert config["schedule"]["warmup"] == pytest.approx(5 * share, abs=1e-4)
    assert config["schedule"]["cooldown"] == pytest.approx(10 * share, abs=1e-4)
    assert "schedule.warmup=0.0484 and schedule.cooldown=0.0968, in proportion" in caplog.text
    longer = prepare_config("afbo_t2_poolformer_s12", "trainer.max_epochs=30", "data.root=/data")
    assert longer["schedule"] == own["schedule"]
    typed = prepare_config(
        "afbo_t2_deit_t", "trainer.max_epochs=3", "schedule.warmup=1", "data.root=/d"
    )
    assert typed["schedule"]["warmup"] == 1


@pytest.mark.parametrize(
    ("devices", "gpus", "nodes", "rate"),
    [(-1, 1, 1, 1e-6 * 96 / 512), (1, 8, 1, 1e-6 * 96 / 512), ("auto", 1, 1, 1e-6 * 96 / 512),
     (-1, 8, 1, 1e-6), (-1, 2, 4, 1e-6), ([0], 1, 1, 1e-6 * 96 / 512)],
)  # fmt: skip
def test_the_first_rate_of_a_row_follows_the_number_of_devices(
    devices, gpus, nodes, rate, monkeypatch
):
    """SBM's fine-tuning starts at 1e-6, above the peak rate for one GPU's batch."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(processes, "_has_gpu", lambda options: True)
    config = {
        "optimizer": {"lr": 5e-6, "reference_batch": 512},
        "schedule": {"warmup_lr": 1e-6, "min_lr": 1e-6, "warmup_start": None},
        "data": {"batch_size": 96},
        "trainer": {"devices": devices, "num_nodes": nodes, "accumulate_grad_batches": 1},
    }
    lines = changed_rows.lower_ends(config, [])
    assert config["schedule"]["warmup_lr"] == pytest.approx(rate)
    assert config["schedule"]["min_lr"] == pytest.approx(rate)
    assert len(lines) == (2 if rate < 1e-6 else 0)
    total = 96 * nodes * (gpus if devices in (-1, "auto") else 1)
    options = {"name": "cosine", "warmup": 5, **config["schedule"]}
    learning_rate_factor(1000, 10, lr=scaled_lr(5e-6, 512, total), **options)  # does not raise


def test_settings_that_do_not_fit_other_data_are_dropped_and_named(caplog):
    caplog.set_level("INFO")
    half = prepare_config("posmlp_t1_posmlp_t_sgu", "data=cifar100", "data.root=/d", "trainer=cpu")
    assert "train_share" not in half["data"]
    assert "data.train_share=0.5 is left out: it belongs to data=imagenet" in caplog.text
    labelled = prepare_config("afbo_t2_lvt_r2", "data=sample_classification")
    assert labelled["data"]["token_labels"] is None
    assert (
        "data.token_labels=null, because the label maps belong to the row's images" in caplog.text
    )
    own = prepare_config("afbo_t2_lvt_r2", "data.root=/data", "data.token_labels=null")
    # The row's augmentation without options that only the sample data's has.
    assert labelled["data"]["augmentation"] == own["data"]["augmentation"]
    dense = prepare_config("iffn_t7_swin_t_iffn", "data=sample_detection")
    assert dense["backbone"]["pretrained"] is False
    assert "starts from random weights, because the data differs from the row's" in caplog.text
    assert dense["data"]["train_sizes"][0] == [1333, 480]  # the row's value is kept


def test_a_recipe_for_other_data_needs_an_experiment(capsys):
    ended = run_here(["recipe=deit", "backbone=deit_t", "data=cifar100", "data.root=/d"], capsys)
    assert ended.status == 2
    assert "this recipe is made for data=imagenet" in ended.err


# Beside the paper


def summary(name, images=50000, **metrics):
    return {
        "metrics": metrics,
        "parameters": ROWS[name].params,
        "data": {"images": {"val": images}},
    }


def test_a_run_of_a_row_is_compared_with_the_paper():
    name = "afbo_t2_deit_t_afbo"
    config = composed(f"experiment={name}", "data.root=/data/imagenet")
    found = compare_with_row(config, summary(name, top1=74.1))
    assert found["row"] == "AFBO Table 2"
    assert "why_not" not in found
    assert found["metrics"]["top1"] == {"paper": 74.6, "ours": 74.1,
                                        "difference": pytest.approx(-0.5)}  # fmt: skip
    shown = report.compare_with_paper({"paper": found})
    assert shown == {"AFBO Table 2, top1": "paper 74.6, ours 74.1, difference -0.5"}


@pytest.mark.parametrize("data", ["imagenet_tar", "imagenet_parquet", "folder"])
@pytest.mark.parametrize(
    "name",
    others_slow(
        [n for n in KINDS.values() if published_test_set(ROWS[n])[0] == FAMILY.published.data],
        "posmlp_t1_posmlp_t_sgu",
    ),
)
def test_imagenet_compares_in_any_container(name, data):
    """Each kind of training on ImageNet starts there, and its figure is compared."""
    typed = [f"experiment={name}", f"data={data}", "data.root=/data"]
    if ROWS[name].train.start:
        typed.append("backbone.pretrained=/weights.ckpt")
    config = composed(*typed)
    config["backbone"]["pretrained"] = "/weights.ckpt" if ROWS[name].train.start else None
    assert config["data"]["train_share"] == (0.5 if "posmlp_t1" in name else 1)
    found = compare_with_row(config, summary(name, top1=50.0))
    assert "why_not" not in found
    assert found["metrics"]["top1"]["difference"] == 50.0 - found["metrics"]["top1"]["paper"]
    found = compare_with_row(config, summary(name, 200, top1=50.0))
    assert found["why_not"] == "200 test images instead of 50000, so the data differs"
    config["data"]["train_share"] = 0.7
    found = compare_with_row(config, summary(name, top1=50.0))
    assert "data.train_share=0.7 instead of" in found["why_not"]


def test_units_of_detectors_are_ours():
    name = "posmlp_t8_posmlp_t_mask_rcnn"
    config = composed(f"experiment={name}", "data.root=/data", "backbone.pretrained=/w.ckpt")
    config["backbone"]["pretrained"] = "/w.ckpt"
    found = compare_with_row(config, summary(name, 5000, AP=0.42, mask_AP=0.38))["metrics"]
    assert found["AP"]["difference"] == pytest.approx(0.42 - 0.416)
    assert found["mask_AP"]["difference"] == pytest.approx(0.38 - 0.384)


@pytest.mark.parametrize(
    ("typed", "images", "reason"),
    [
        (["data.root=/data", "trainer.max_epochs=9"], 50000, "trainer.max_epochs=9 instead of 300"),
        (["data.root=/data"], 200, "200 test images instead of 50000, so the data differs"),
        (["data.root={cache}/classification"], 50000, "trained on sample data"),
    ],
)
def test_an_incomparable_figure_gives_the_reason(typed, images, reason, monkeypatch, tmp_path):
    monkeypatch.setenv("MIXERLAB_CACHE", str(tmp_path))
    name = "iffn_t1_deit_t"
    typed = [one.format(cache=tmp_path) for one in typed]
    found = compare_with_row(
        composed(f"experiment={name}", *typed), summary(name, images, top1=10.0)
    )
    assert found["metrics"]["top1"] == {"paper": 72.2, "ours": 10.0}
    assert reason in found["why_not"]
    shown = report.compare_with_paper({"paper": found})
    assert shown["does not compare"] == found["why_not"]


@pytest.mark.parametrize(
    ("typed", "reason"),
    [
        (["recipe=null"], "instead of"),
        (["backbone.drop_path_rate=0.3"], "backbone.drop_path_rate=0.3 instead of 0.1"),
        (["trainer.max_steps=10"], "trainer.max_steps=10 instead of -1"),
        (["trainer.limit_train_batches=5"], "trainer.limit_train_batches=5 instead of 1.0"),
        (["data.image_size=160"], "data.image_size=160 instead of 224"),
        (["data=sample_classification"], "trained on sample data"),
        (["data=cifar100"], "made on CIFAR100DataModule, not on the paper's data"),
        (["backbone=deit_s_afbo"], "backbone=deit_s_afbo instead of deit_t_afbo"),
    ],
)
def test_a_changed_row_is_shown_but_not_compared(typed, reason):
    name = "afbo_t2_deit_t_afbo"
    config = composed(f"experiment={name}", "data.root=/data/imagenet", *typed)
    found = compare_with_row(config, summary(name, top1=70.0))
    assert found["metrics"]["top1"] == {"paper": 74.6, "ours": 70.0}
    assert reason in found["why_not"]
    assert report.compare_with_paper({"paper": found})["does not compare"] == found["why_not"]


@pytest.mark.parametrize(
    ("name", "typed", "metrics"),
    [
        ("iffn_t7_swin_t_iffn", ["data=sample_detection"], {"AP": 0.1}),
        ("iffn_t8_swin_t", ["data=sample_segmentation"], {"mIoU": 3.0}),
        ("sbm_t2_sbm_b_finetune", ["data=sample_transfer"], {"top1": 3.0}),
        ("iffn_t7_swin_t_iffn", ["head=retinanet"], {"AP": 0.1}),
        ("posmlp_t2_posmlp_b", ["backbone.drop_path_rate=0.3", "trainer.max_epochs=2"],
         {"top1": 3.0}),
    ],
)  # fmt: skip
def test_changed_rows_of_all_tasks_are_shown(name, typed, metrics):
    config = composed(f"experiment={name}", "data.root=/data", *typed)
    found = compare_with_row(config, summary(name, **metrics))
    ((figure, value),) = metrics.items()
    assert found["metrics"][figure]["ours"] == value
    assert "difference" not in found["metrics"][figure]
    assert found["why_not"]


def test_label_maps_may_be_anywhere_but_are_required():
    name = "afbo_t2_lvt_r2"
    found = compare_with_row(
        composed(f"experiment={name}", "data.root=/d", "data.token_labels=/maps"),
        summary(name, top1=74.0),
    )
    assert "why_not" not in found
    without = composed(f"experiment={name}", "data.root=/d", "data.token_labels=null")
    found = compare_with_row(without, summary(name, top1=74.0))
    assert "data.token_labels=None instead of required" in found["why_not"]


def test_random_weights_do_not_compare_where_the_row_starts_from_others():
    name = "iffn_t8_swin_t"
    found = compare_with_row(
        composed(f"experiment={name}", "data.root=/d"), summary(name, 2000, mIoU=9.0)
    )
    assert "trained from random weights" in found["why_not"]


def test_a_run_without_a_row_is_not_compared():
    assert (
        compare_with_row(composed("backbone=deit_t"), summary("iffn_t1_deit_t", top1=1.0)) is None
    )


@pytest.fixture
def evaluated(tmp_path):
    """Return the config of ``mode=test`` for a run folder of a command."""

    def make(*typed, beside=()):
        folder = tmp_path / "run"
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "checkpoints" / "best.ckpt").write_bytes(b"")
        (folder / "config.yaml").write_text(yaml.safe_dump(composed(*typed)))
        return composed("mode=test", f"ckpt={folder}", *beside)

    return make


def test_an_evaluation_compares_the_training_in_its_folder(evaluated):
    name = "afbo_t2_deit_t"
    config = evaluated(f"experiment={name}", "data.root=/data", beside=["trainer=cpu"])
    found = compare_with_row(config, summary(name, top1=72.0))
    assert found["metrics"]["top1"]["difference"] == pytest.approx(-0.2)


def test_an_evaluation_of_a_shorter_training_does_not_compare(evaluated):
    name = "afbo_t2_deit_t"
    config = evaluated(f"experiment={name}", "data.root=/data", "trainer.max_epochs=9")
    assert (
        "trainer.max_epochs=9 instead of 300"
        in compare_with_row(config, summary(name, top1=9))["why_not"]
    )


def test_an_experiment_with_foreign_weights_compares_model_and_data(tmp_path):
    name, weights = "afbo_t2_deit_t", tmp_path / "deit_tiny.pth"
    weights.write_bytes(b"")
    typed = [f"experiment={name}", "mode=test", f"ckpt={weights}", "data.root=/d", "trainer=cpu"]
    found = compare_with_row(composed(*typed), summary(name, top1=72.2))
    assert found["metrics"]["top1"]["difference"] == pytest.approx(0)
    found = compare_with_row(composed(*typed, "data.image_size=192"), summary(name, top1=72.2))
    assert "data.image_size=192 instead of 224" in found["why_not"]


# Trained

STAND_INS = {
    "classification": (SampleClassification, {"digits_per_class": 4, "train_copies": 1}),
    "transfer": (SampleTransfer, {"train_per_class": 1, "val_per_class": 1}),
    "detection": (SampleDetection, {"num_train": 2, "num_val": 1}),
    "segmentation": (SampleSegmentation, {"num_train": 4, "num_val": 1}),
}
DRAWN = (
    "afbo_t2_deit_t_afbo",
    "posmlp_t4_posmlp_t_groups_1",
    "ffnet_t1_ffnet_1",
    "sbm_t6_sbm_t_pos_none",
    "sbm_t2_deit_b_linear_probe",
    "afbo_t4_poolformer_s12_afbo_retinanet",
    "iffn_t7_swin_t_iffn",
    "iffn_t8_swin_t_iffn",
    "ffnet_t2_ffnet_2",
    "ffnet_t3_ffnet_seg_ade20k",
)


@pytest.mark.slow  # a minute each, at the papers' image sizes
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
    ended = run_here(typed, capsys)
    assert ended.status == 0, ended.err
    assert "does not compare" in ended.out
    (folder,) = tmp_path.glob("*/*/2*")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["paper"]["experiment"] == name
    assert summary["paper"]["why_not"].startswith("trained on sample data")
    assert all(figures["paper"] > 0 for figures in summary["paper"]["metrics"].values())
    assert set(summary["paper"]["metrics"]) & set(summary["metrics"])
    ended = run_here(
        [
            "mode=test",
            f"ckpt={folder}",
            f"output_dir={tmp_path}",
            "trainer=cpu",
            "trainer.limit_val_batches=1",
        ],
        capsys,
    )
    assert ended.status == 0, ended.err
    assert "does not compare" in ended.out
