"""tools/results.py: which runs share a row or a table, and the reports of broken folders."""

import json
import math
import operator
import re
import shutil
from pathlib import Path

import matplotlib.image
import pytest
import torch
import yaml
from PIL import Image

from backbones import create_backbone
from backbones.analysis.description import describe_network
from datamodules import ClassFoldersDataModule, FashionMNISTDataModule
from datamodules.images.image_folder import ImageFolderDataModule
from datamodules.sample.dense import SampleDetection
from tasks.engine.family import families, imported
from tasks.engine.run_folder.run_config import RunConfig
from tasks.engine.run_folder.saved_runs import CONFIG, read_config
from tests.families import rest_slow, rest_slow_pairs
from tests.runs import SMALLEST, composed
from tests.stand_ins import write_fashion_mnist
from tools import results
from tools.cli.network_names import network_name
from tools.comparing.table import pareto
from tools.papers.published import load_rows
from tools.runs.components import read_data
from tools.runs.fingerprints import content_fingerprint, fingerprints, training_fingerprints
from tools.runs.folder import differences, open_run_folder
from tools.runs.outcome import recording_failure

CROP = "+data.augmentation.crop_pct=0.875"  # the recipe's; data=imagenet has 0.9


@pytest.fixture
def run(tmp_path):
    """Write a run folder with the settings of a real config."""

    def write(*overrides, seed=0, metrics=None, parameters=5e6, macs=1e9, finished=True, data=None,
              network=None, macs_at=(64, 64)):  # fmt: skip
        config = composed(*overrides, f"seed={seed}")
        name = config.backbone["name"]
        parent = tmp_path / "outputs" / config.task_name / name
        number = len(list(parent.glob("2026*"))) if parent.is_dir() else 0
        folder = parent / f"2026-01-{number + 1:02d}_00-00-00"
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(yaml.safe_dump(config.plain(), sort_keys=False))
        if finished:
            content = {"metrics": metrics or {"top1": 50.0}, "parameters": parameters,
                       "backbone_macs": macs, "macs_at": macs_at, "seconds": 60.0}  # fmt: skip
            content |= {"data": data} if data else {}
            content |= {"network": network} if network else {}
            (folder / "summary.json").write_text(json.dumps(content))
        return folder

    return write


@pytest.fixture
def shown(tmp_path, capsys):
    """Return the records that the command prints as JSON, and its standard error."""

    def show(*typed):
        status = results.main([str(tmp_path / "outputs"), "format=json", *typed])
        out, err = capsys.readouterr()
        return (json.loads(out) if status == 0 else status), err

    return show


@pytest.fixture
def printed(tmp_path, capsys):
    """Return what the command prints, and its standard error."""

    def show(*typed):
        assert results.main([str(tmp_path / "outputs"), *typed]) == 0
        return capsys.readouterr()

    return show


def test_seeds_are_averaged_and_a_link_counts_no_run_twice(run, shown):
    for seed, top1 in enumerate((50.0, 52.0, 57.0)):
        folder = run("backbone=deit_t", seed=seed, metrics={"top1": top1, "top5": 90.0})
    (folder.parent / "latest").symlink_to(folder.name)
    records, err = shown(str(folder.parent / "*"))
    assert err == ""
    (record,) = records
    assert record["top1"] == 53.0
    assert record["top1_std"] == pytest.approx(math.sqrt((9 + 1 + 16) / 2))
    assert (record["runs"], record["parameters_m"], record["backbone_macs_g"]) == (3, 5, 1)
    assert shown("metric=top5")[0][0]["top5_std"] == 0
    assert shown("metric=top9") == (2, "results.py: no run of task=classification has a metric "
                                       "'top9'; known: top1, top5\n")  # fmt: skip


@pytest.mark.parametrize(
    "other",
    ["trainer.max_epochs=9", "data.train_share=0.5", "callbacks.early_stopping.patience=3",
     "backbone.mixer.g2=6"],
)  # fmt: skip
def test_different_settings_are_named_and_never_averaged(other, run, shown):
    run("backbone=deit_t_afbo", seed=0)
    run("backbone=deit_t_afbo", other, seed=1)
    records, err = shown()
    assert [record["runs"] for record in records] == [1, 1]
    assert all(record["top1_std"] is None for record in records)
    assert "2 runs are not averaged together, they differ in" in err
    assert other.partition("=")[0] in err
    assert {record["evaluation"] for record in records} == {""}


def test_labels_hold_what_distinguishes_rows(run, shown):
    first, second, third, last = (
        [f"data.batch_size={size}", f"data.train_share={size / 8}", f"optimizer.lr={size}e-3",
         f"schedule.warmup={warmup}"]
        for size, warmup in ((4, 0), (4, 1), (2, 0), (2, 1))
    )  # fmt: skip
    for typed in (first, second, third, last):
        run("backbone=deit_t", "trainer.max_epochs=5", *typed)
    labels = [record["settings"] for record in shown()[0]]
    assert len(set(labels)) == 4
    assert all(" schedule.warmup=" in label for label in labels)


def test_runs_of_other_code_stand_apart(run, shown):
    def write(seed, *answer):
        file = run("backbone=deit_t", seed=seed) / "summary.json"
        fingerprint = {"fingerprint": {"output": answer}} if answer else {}
        file.write_text(json.dumps(json.loads(file.read_text()) | fingerprint))

    for seed, answer in enumerate([(), (1.0, 0.0), (1.0, 1e-7)]):  # the first is older
        write(seed, *answer)
    assert [record["runs"] for record in shown()[0]] == [3]
    write(3, 1.0, 0.1)
    found = {record["settings"]: record["runs"] for record in shown()[0]}
    assert found == {"code=version 1": 2, "code=version 2": 1, "code=unknown": 1}


def data_summary(classes="c0ffee", val="decade", images=100, train=1000, number=10):
    """Return the ``data`` of a summary."""
    return {"samples": {"train": train, "val": images}, "classes": number,
            "fingerprints": {"classes": classes, "val": val}}  # fmt: skip


@pytest.mark.parametrize(
    ("typed", "data", "said"),
    [
        *(([typed], data_summary(), typed.lstrip("+")) for typed in (
            "data.image_size=32", "data=sample_transfer", "trainer.limit_val_batches=2",
        )),
        ([], data_summary(classes="beef00"), "classes 10 (beef00)"),
        ([], data_summary(val="fade00"), "validation images 100 (fade00)"),
        ([], None, "classes unknown"),
    ],
)  # fmt: skip
def test_each_kind_of_evaluation_has_its_own_table(typed, data, said, run, shown, printed):
    run("backbone=deit_t", data=data_summary())
    run("backbone=deit_t", *typed, seed=1, data=data)
    run("backbone=deit_t_afbo", *typed, data=data)
    records, err = shown()
    assert [record["runs"] for record in records] == [1, 1, 1]
    assert "not averaged" not in err
    headings = [record["evaluation"] for record in records]
    assert headings[0] not in headings[1:]
    assert headings[1] == headings[2]
    assert said in headings[1]
    one, other = printed().out.split("task=classification, ")[1:]
    assert (one.count("deit_t "), other.count("deit_t ")) >= (1, 1)
    assert "deit_t_afbo" not in one


def network_summary(backbone, **options):
    """Return the ``network`` of a run's summary."""
    with torch.device("meta"):
        return describe_network(create_backbone(backbone, **options))


@pytest.fixture
def described(run):
    """Write a run folder that describes data and network."""

    def write(name, *typed, network=None, **more):
        network = network_summary(name) if network is None else network
        return run(
            f"backbone={name}", *typed, **{"network": network, "data": data_summary(), **more}
        )

    return write


def test_iffn_shares_equal_terms_with_hosts_without_class_tokens(described, shown, printed):
    """IFFN builds DeiT without its class token."""
    for name in ("deit_t", "deit_t_afbo", "deit_t_iffn"):
        described(name)
    for name in ("deit_t", "deit_t_afbo"):
        network = network_summary(name, class_token=False)
        described(name, "backbone.class_token=false", network=network)
    terms = {f"{r['backbone']} {r['settings']}".strip(): r["terms"] for r in shown()[0]}
    without, token = (f"backbone.class_token={value}" for value in ("false", "true"))
    assert terms["deit_t_iffn"] == terms[f"deit_t {without}"] == terms[f"deit_t_afbo {without}"]
    assert terms[f"deit_t {token}"] == terms[f"deit_t_afbo {token}"]
    assert {terms["deit_t_iffn"], terms[f"deit_t {token}"]} == {"a", "b"}
    lines = printed().out.splitlines()
    assert any("on equal terms apart from the mixer: a: " in line for line in lines)
    (line,) = (line for line in lines if "pooling mean of the map" in line)
    assert "class tokens 0, pooling mean of the map, backbone.class_token=false: " in line
    assert "deit_t_iffn" in line
    assert "parameters outside" not in line


@pytest.mark.parametrize(
    "typed",
    ["backbone.drop_path_rate=0.2", "data.augmentation.shift=0.1", "task.ema={decay: 0.9}"],
)  # fmt: skip
def test_differences_besides_the_mixer_are_listed(typed, described, printed):
    described("swin_t")
    described("swin_t_afbo", typed)
    out, said = printed().out, typed.replace("={decay: 0.9}", ".decay=0.9")
    assert "besides the mixer these differ:" in out
    assert f"{said}: swin_t_afbo" in out
    assert "on equal terms" not in out


def test_other_weights_of_the_same_mixer_and_hosts_are_named(described, run, printed):
    described("swin_t")
    described("swin_t_afbo")
    described("swin_t_afbo", "backbone.mixer.g2=6")
    described("deit_t", data=data_summary(train=500))
    run("backbone=deit_t_afbo", data=data_summary(), seed=3)
    out = printed().out
    for said in (
        "a: swin_t, swin_t_afbo backbone.mixer.g2=3, swin_t_afbo backbone.mixer.g2=6",
        "host swin_t", "host deit_t", "training images 500: deit_t",
        "not known to be on equal terms: deit_t_afbo (summary.json lacks the network)",
    ):  # fmt: skip
        assert said in out


def test_rows_name_settings_that_change_the_metric(run, shown):
    common = ("task=detection", "backbone=swin_t", "data=coco", "data.root=/data/coco")
    skipped = run(*common, "data.skip_unusable_boxes=true", metrics={"AP": 0.58})
    (record,) = shown()[0]
    assert record["settings"] == "data.skip_unusable_boxes=true"
    run(*common, metrics={"AP": 0.52})
    older = run(*common, seed=1, metrics={"AP": 0.54})
    config = yaml.safe_load((older / "config.yaml").read_text())
    del config["data"]["skip_unusable_boxes"]  # from before the option existed
    (older / "config.yaml").write_text(yaml.safe_dump(config))
    usual = "data.skip_unusable_boxes=false"
    # Alone in a table, a row needs no distinction.
    for typed, named in (((), ""), (("free=data.skip_unusable_boxes",), usual)):
        records = {record["runs"]: record for record in shown(*typed)[0]}
        assert records[1]["settings"] == "data.skip_unusable_boxes=true"
        assert records[1]["AP"] == 0.58
        assert records[2]["settings"] == named
        assert records[2]["AP"] == pytest.approx(0.53)
    assert shown(str(skipped))[0][0]["AP"] == 0.58


def test_runs_are_separated_by_settings_with_an_effect(run, shown):
    run("backbone=deit_t", seed=0)
    run("backbone=deit_t", "data.num_workers=2", "logger=csv", "callbacks.top_k=3",
        "trainer.log_every_n_steps=1", "data.root=/elsewhere", seed=1)  # fmt: skip
    assert [record["runs"] for record in shown()[0]] == [2]
    for seed, root in enumerate(("/data/imagenet", "/data/other")):
        run("backbone=deit_s", "data=imagenet", f"data.root={root}", seed=seed)
    for typed, runs in ((), [1, 1]), (("free=data.root",), [2]):
        assert [one["runs"] for one in shown(*typed)[0] if one["backbone"] == "deit_s"] == runs


def test_a_seed_that_was_run_twice_counts_once(run, shown):
    first = run("backbone=deit_t", metrics={"top1": 10.0})
    run("backbone=deit_t", metrics={"top1": 30.0})
    records, err = shown()
    assert (records[0]["runs"], records[0]["top1"]) == (1, 30.0)
    assert f"{first} is left out" in err


def test_unfinished_failed_and_broken_runs_are_named(run, shown):
    run("backbone=deit_t")
    cut, failed, odd = (run("backbone=deit_t", seed=s, finished=False) for s in (1, 2, 7))
    (cut / "metrics.csv").write_text("step,epoch,train/loss\n4,0,1.5\n9,1,1.2\n14,1")
    with pytest.raises(ValueError, match="the loss"), recording_failure(failed):
        raise ValueError("the loss is nan\nat once")
    (odd / "metrics.csv").write_bytes(b"\xff\xfe\x00")
    half, yaml_broken, lacking = (run("backbone=deit_t", seed=seed) for seed in (3, 4, 6))
    (half / "summary.json").write_text('{"metrics": {"top1": 1')
    (yaml_broken / "config.yaml").write_text("a: [1")
    nan = run("backbone=deit_t", seed=5, metrics={"top1": float("nan")})
    (lacking / "summary.json").write_text('{"metrics": {"top1": 1}}')
    run("backbone=deit_t", "mode=test", f"ckpt={__file__}")
    records, err = shown()
    assert [record["runs"] for record in records] == [1]
    for folder, said in {
        cut: "not finished: logged last at step 9, epoch 2 of",
        failed: "failed: the loss is nan\n",
        half: "summary.json cannot be read",
        yaml_broken: "config.yaml cannot be read",
        nan: "failed: top1 must be a finite number\n",
        lacking: "summary.json is damaged: the entry parameters is missing",
        odd: "metrics.csv lacks a complete line",
    }.items():
        assert said in next(line for line in err.splitlines(True) if str(folder) in line)
    assert "1 evaluations (mode=validate, test or predict) are left out" in err


@pytest.fixture
def published(run):
    """Two seeds of an experiment on its real data, and one run with fewer epochs."""
    row = next(r for r in load_rows("afbo", "classification")
               if (str(r), r.table) == ("deit_t_afbo", 2))  # fmt: skip
    own = ("experiment=afbo_t2_deit_t_afbo", "data.root=/data/imagenet")
    data = data_summary(images=50000, number=1000)
    for seed, top1 in enumerate((74.2, 74.4)):
        run(*own, seed=seed, metrics={"top1": top1}, parameters=row.params, macs=row.macs * 1e9,
            data=data)  # fmt: skip
    return lambda *more: run(*own, *more, seed=5, metrics={"top1": 60.0}, parameters=row.params,
                             data=data)  # fmt: skip


def test_published_rows_alone_are_compared_with_the_paper(published, shown, run):
    records, err = shown()
    assert err == ""
    assert (records[0]["top1_paper"], records[0]["paper"]) == (74.6, "AFBO Table 2")
    assert records[0]["top1_difference"] == pytest.approx(-0.3)
    published("trainer.max_epochs=10")
    run("backbone=deit_t_afbo", "paper={name: afbo, table: 2}", seed=6)
    run("experiment=afbo_t2_swin_t_afbo", "data.root=/data/imagenet", parameters=28000000)
    records, err = shown()
    assert sorted(record["top1_paper"] or 0 for record in records) == [0, 0, 0, 74.6]
    assert "trainer.max_epochs=10 instead of 300" in err
    assert "28000000 parameters instead of 27940450, so the model or classes differ" in err


@pytest.mark.parametrize(
    ("form", "part"),
    [("markdown", "| deit_t | 1 | 61.25 | - |"), ("latex", r"deit\_t & 1 & 61.25 & - &"),
     ("csv", "classification,deit_t,,1,61.25,,"), ("table", "task=segmentation\n")],
)  # fmt: skip
def test_formats(form, part, run, printed, tmp_path):
    folder = run("backbone=deit_t", metrics={"top1": 61.25})
    run("backbone=swin_t", "task=segmentation", metrics={"mIoU": 41.5})
    assert results.main([str(folder), f"out={folder / 'summary.json'}"]) == 2
    out = tmp_path / "table.txt"
    assert printed(f"format={form}", f"out={out}").out == ""
    text = out.read_text()
    assert all(word in text for word in ("61.25", "41.5", "mIoU", part))


IMAGENET = ("data=imagenet", "data.root=/x", CROP)


@pytest.mark.parametrize("cost", ["params", "macs"])
def test_plot(cost, published, run, printed, tmp_path):
    run("backbone=deit_t", *IMAGENET, metrics={"top1": 72.0}, macs=2e8,
        data=data_summary(images=50000, number=1000))  # fmt: skip
    path = tmp_path / "plot.png"
    err = printed(f"plot={cost}", f"out={path}").err
    assert f"plot: {path}" in err
    assert "only has points of runs" not in err
    assert matplotlib.image.imread(path).std() > 0.02


def test_latency_of_networks_for_series(run, printed):
    run("task=forecasting", "backbone=nlinear", metrics={"mse": 0.4}, macs_at=(96, 3))
    assert "timed with" in printed("plot=latency").err


def test_wrong_arguments_are_one_sentence(run, shown, tmp_path, capsys):
    run("backbone=deit_t", finished=False)
    last = shown()[1].splitlines()[-1]
    assert last == "results.py: none of 1 runs is a finished training run"
    run("backbone=deit_t")
    assert "did you mean optimizer.lr" in shown("by=optimizer.lrr")[1]
    assert "did you mean metric=?" in shown("metrix=top1")[1]
    (tmp_path / "empty").mkdir()
    for folder, status in (("nowhere", 2), ("", 0), ("empty", 2)):
        assert results.main([str(tmp_path / folder)]) == status
    assert "no run folder found" in capsys.readouterr().err


def test_headlines_and_pareto_lines():
    known = {name: family.table_metric for name, family in families().items()}
    # Their tasks show the scores of their loss and of their data set.
    assert (known.pop("forecasting"), known.pop("glue")) == ("mse", "score")
    assert {name: imported(families()[name].task).headline[0] for name in known} == known
    assert pareto([(2, 5), (1, 3), (3, 4), (1, 2), (4, 6)], "max") == [1, 0, 4]
    assert pareto([(2, 5), (1, 3), (3, 4), (4, 1)], "min") == [1, 3]


@pytest.mark.slow
def test_a_real_run_is_in_the_table(trained, outputs, capsys):
    trained("classification")
    folder = Path(outputs / "classification" / "deit_t" / "latest")
    assert results.main([str(folder), "format=json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    own = json.loads((folder / "summary.json").read_text())
    assert record["top1"] == pytest.approx(own["metrics"]["top1"], abs=1e-6)
    assert own["network"] == network_summary("deit_t", img_size=64)
    assert own["data"]["classes"] == 10
    assert all(re.fullmatch("[0-9a-f]{12}", one) for one in own["data"]["fingerprints"].values())


@pytest.mark.parametrize("family", rest_slow(SMALLEST, ["classification", "detection"]))
def test_a_run_has_the_fingerprints_of_its_data_read_again(family, smallest_run):
    folder = smallest_run(family)
    datamodule = read_data(RunConfig.model_validate(read_config(folder / CONFIG)))
    prints = fingerprints(datamodule) | training_fingerprints(datamodule)
    assert json.loads((folder / "summary.json").read_text())["data"]["fingerprints"] == prints
    assert "train" in prints


def test_fingerprints_recognise_a_moved_dataset(tmp_path):
    """Fingerprints cover classes, their order, labels, and names and sizes of validation images."""

    def prints(root):
        data = ImageFolderDataModule(root, image_size=32, batch_size=2, num_workers=0)
        data.setup()
        return fingerprints(data)

    first = tmp_path / "first"
    for split, size in (("train", 8), ("val", 9)):
        for number, name in enumerate(("ant", "bee")):
            folder = first / split / name
            folder.mkdir(parents=True)
            Image.new("RGB", (size, size), (number, 0, 0)).save(folder / "0.png")
    own = prints(first)
    moved = shutil.copytree(first, tmp_path / "moved")
    assert prints(moved) == own
    (moved / "train" / "bee" / "1.png").write_bytes((first / "train/bee/0.png").read_bytes())
    assert prints(moved) == own  # of the validation images, not of the training images
    (moved / "val" / "bee" / "0.png").rename(moved / "val" / "ant" / "1.png")
    Image.new("RGB", (9, 9)).save(moved / "val" / "bee" / "1.png")
    assert prints(moved)["val"] != own["val"]
    assert prints(moved)["classes"] == own["classes"]
    other = shutil.copytree(first, tmp_path / "other")
    Image.effect_noise((9, 9), 50).convert("RGB").save(other / "val" / "ant" / "0.png")
    assert prints(other)["val"] != own["val"]
    for split in ("train", "val"):
        (other / split / "ant").rename(other / split / "cat")
    assert prints(other)["classes"] != own["classes"]


def test_fingerprints_of_detection_include_the_annotations(tmp_path):
    pytest.importorskip("mmdet")
    data = SampleDetection(tmp_path, num_train=2, num_val=2, scene_size=64)
    data.prepare_data()
    data.setup()
    own = fingerprints(data)
    file = data.root / data.val_annotations
    content = json.loads(file.read_text())
    content["annotations"] = content["annotations"][1:]
    file.write_text(json.dumps(content))
    assert fingerprints(data)["val"] != own["val"]
    assert fingerprints(data)["classes"] == own["classes"]
    of_training = content_fingerprint(data, "train")
    assert content_fingerprint(data, "val") is None
    file = data.root / data.train_annotations
    content = json.loads(file.read_text())
    content["annotations"][0]["area"] += 1
    file.write_text(json.dumps(content))
    again = SampleDetection(tmp_path, num_train=2, num_val=2, scene_size=64)
    again.setup()
    assert content_fingerprint(again, "train") != of_training


def test_fingerprints_see_other_labels_and_pixels_in_the_same_files(tmp_path):
    for name in ("a.png", "b.png"):
        Image.new("RGB", (32, 32)).save(tmp_path / name)
    table = tmp_path / "labels.csv"
    table.write_text("image,cat,dog,split\na.png,0,1,train\nb.png,1,0,val\n")
    options = {"image_size": 32, "num_workers": 0}
    before = content_of(ClassFoldersDataModule(tmp_path, labels="labels.csv", **options))
    assert content_of(ClassFoldersDataModule(tmp_path, labels="labels.csv", **options)) == before
    table.write_text(table.read_text().replace("b.png,1,0", "b.png,1,1"))
    after = content_of(ClassFoldersDataModule(tmp_path, labels="labels.csv", **options))
    assert [*map(operator.eq, before, after)] == [True, False, True]

    write_fashion_mnist(tmp_path, pack=bytes)
    before = content_of(FashionMNISTDataModule(tmp_path, **options))
    file = tmp_path / "t10k-images-idx3-ubyte"
    file.write_bytes(file.read_bytes()[:-1] + b"\7")  # the same name and size
    after = content_of(FashionMNISTDataModule(tmp_path, **options))
    assert [*map(operator.eq, before, after)] == [True, True, False]


def content_of(data):
    data.setup()
    prints = fingerprints(data)
    train = content_fingerprint(data, "train")
    return train, prints["val content"], prints.get("test content")


TOKENS = "backbone.token_mixer="
GGQPE = f"{TOKENS}ggqpe"
# Options of two runs, and the option by which they differ, if any.
SAME_OR_OTHER = [
    ([GGQPE], [f"{TOKENS}{{name: ggqpe}}"], None),
    ([GGQPE], [f"{TOKENS}{{name: ggqpe, sigma: gamma_gammaT, groups: [8,16,32,64]}}"], None),
    ([], ["+optimizer.eps=1e-8"], None),
    (["optimizer.name=sgd"], ["optimizer.name=sgd", "+optimizer.momentum=0"], None),
    ([], ["++head.drop=0.0"], None),
    ([], ["++data.token_boxes=image"], None),
    (["backbone=deit_t"], ["backbone=deit_t", "backbone.mixer.drop=0.0"], None),
    ([GGQPE], [f"{TOKENS}{{name: ggqpe, sigma: alpha}}"], "sigma"),
    ([], ["+optimizer.eps=1e-6"], "optimizer.eps"),
]


@pytest.mark.parametrize(
    ("one", "other", "named"),
    rest_slow_pairs(SAME_OR_OTHER, [*SAME_OR_OTHER[1:3], SAME_OR_OTHER[-2]]),
    ids=str,
)
def test_only_another_value_than_the_default_makes_a_row(one, other, named, run, shown):
    run(*one, seed=0)
    folder = run(*other, seed=1)
    records, _ = shown()
    assert [record["runs"] for record in records] == ([1, 1] if named else [2])
    assert (named or "") in " ".join(record["settings"] for record in records)
    assert bool(differences(folder, composed(*one, "seed=1"))) == bool(named)  # may not be resumed


def test_token_mixers_are_named_in_tables_plots_and_folders(run, shown, tmp_path):
    run("backbone=deit_t")
    run("backbone=deit_t", f"{TOKENS}sbm", macs=2e9)
    run("backbone=deit_t", f"{TOKENS}{{name: ggqpe, sigma: alpha}}", macs=3e9)
    run("backbone=posmlp_t_lrpe", macs=4e9)
    path = tmp_path / "plot.svg"
    records, _ = shown("plot=macs", f"out={path}")
    names = ["deit_t", "deit_t+ggqpe", "deit_t+sbm", "posmlp_t_lrpe"]
    assert sorted(record["backbone"] for record in records) == names
    assert all(f"<!-- {name} -->" in path.read_text() for name in names)
    for words, name in (([], "deit_t"), ([f"{TOKENS}sbm"], "deit_t+sbm"),
                        ([f"{TOKENS}{{name: ggqpe, sigma: alpha}}"], "deit_t+ggqpe")):  # fmt: skip
        config = composed("backbone=deit_t", *words, f"output_dir={tmp_path}")
        with open_run_folder(config) as folder:
            assert folder.parent.name == name
    assert network_name("posmlp_t_lrpe", {"name": "lrpe", "window": 7}) == "posmlp_t_lrpe"
    assert network_name("deit_t", {"rank": 3}) == network_name("deit_t", None) == "deit_t"


def test_a_plot_over_a_setting_lists_it_once(run, printed, tmp_path):
    for share in (0.5, 1.0):
        run("backbone=deit_t", f"data.train_share={share}")
    assert "besides the mixer these differ:\n  data.train_share" in printed().out
    path = tmp_path / "plot.svg"
    printed("plot=data.train_share", f"out={path}")
    assert "besides the mixer" not in path.read_text()
    printed("plot=macs", f"out={path}")
    assert "besides the mixer" in path.read_text()


def test_metrics_that_a_task_lacks_are_dashes(run, printed, shown):
    run("backbone=deit_t", metrics={"top1": 50.0, "top5": 90.0})
    run("backbone=deit_t", "data.image_size=32", metrics={"top1": 40.0})  # of three classes
    out, err = printed("metric=top1,top5")
    assert err == ""
    figures = [line.split()[2:6] for line in out.splitlines() if line.startswith("deit_t")]
    assert sorted(figures) == [["40.00", "-", "-", "-"], ["50.00", "-", "90.00", "-"]]
    assert shown("metric=top9")[0] == 2
