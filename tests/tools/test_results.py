"""tools/results.py: what is put together, what is kept apart, and what broken folders give."""

import json
import math
from pathlib import Path

import matplotlib.image
import pytest
import yaml

from backbones.registry import mixers, temporary_registrations
from tasks.classification import ClassificationTask
from tasks.detection import DetectionTask
from tasks.segmentation import SegmentationTask
from tests.families import rest_slow
from tests.runs import composed
from tools import results
from tools.command_line.lazy_groups import register
from tools.comparing.published import load_rows
from tools.comparing.table import HEADLINE, pareto
from tools.running.outcome import failure_noted

TASK = {"classification": ClassificationTask, "transfer": ClassificationTask,
        "detection": DetectionTask, "segmentation": SegmentationTask}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _backbones_are_options():
    register()


@pytest.fixture
def run(tmp_path):
    """Writes a run folder; its settings are those of the real config."""

    def write(*overrides, seed=0, metrics=None, parameters=5e6, macs=1e9, finished=True):
        config = composed(*overrides, f"seed={seed}")
        name = config["backbone"]["name"]
        parent = tmp_path / "outputs" / config["task_name"] / name
        number = len(list(parent.glob("2026*"))) if parent.is_dir() else 0
        folder = parent / f"2026-01-{number + 1:02d}_00-00-00"
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
        if finished:
            content = {"metrics": metrics or {"top1": 50.0}, "parameters": parameters,
                       "backbone_macs": macs, "macs_at": [64, 64], "seconds": 60.0}  # fmt: skip
            (folder / "summary.json").write_text(json.dumps(content))
        return folder

    return write


@pytest.fixture
def shown(tmp_path, capsys):
    """The records that the command prints as JSON, and what it says beside them."""

    def show(*typed):
        status = results.main([str(tmp_path / "outputs"), "format=json", *typed])
        out, err = capsys.readouterr()
        return (json.loads(out) if status == 0 else status), err

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
    ["trainer.max_epochs=9", "data.image_size=32", "optimizer.lr=0.1", "data.batch_size=4",
     "data=sample_transfer", "callbacks.early_stopping.patience=3", "backbone.mixer.g2=6"],
)  # fmt: skip
def test_other_settings_are_named_and_never_averaged(other, run, shown):
    run("backbone=deit_t_afbo", seed=0)
    run("backbone=deit_t_afbo", other, seed=1)
    records, err = shown()
    assert [record["runs"] for record in records] == [1, 1]
    assert all(record["top1_std"] is None for record in records)
    assert "2 runs are not averaged together, they differ in" in err
    key = {"data=sample_transfer": "data._target_"}.get(other, other.partition("=")[0])
    assert key in err


def test_rows_name_what_their_metric_does_not_count(run, shown):
    common = ("task=detection", "backbone=swin_t", "data=coco", "data.root=/data/coco")
    skipped = run(*common, "data.skip_unusable_boxes=true", metrics={"AP": 0.58})
    (record,) = shown()[0]
    assert record["settings"] == "data.skip_unusable_boxes=true"
    run(*common, metrics={"AP": 0.52})
    older = run(*common, seed=1, metrics={"AP": 0.54})
    config = yaml.safe_load((older / "config.yaml").read_text())
    del config["data"]["skip_unusable_boxes"]  # of before the option existed
    (older / "config.yaml").write_text(yaml.safe_dump(config))
    for typed in ((), ("free=data.skip_unusable_boxes",)):
        records = {record["runs"]: record for record in shown(*typed)[0]}
        assert records[1]["settings"] == "data.skip_unusable_boxes=true"
        assert records[1]["AP"] == 0.58
        assert records[2]["settings"] == "data.skip_unusable_boxes=false"
        assert records[2]["AP"] == pytest.approx(0.53)
    assert shown(str(skipped))[0][0]["AP"] == 0.58


def test_settings_that_change_no_result_do_not_part_runs(run, shown):
    run("backbone=deit_t", seed=0)
    run("backbone=deit_t", "data.num_workers=2", "logger=csv", "callbacks.top_k=3",
        "trainer.log_every_n_steps=1", "data.root=/elsewhere", seed=1)  # fmt: skip
    assert [record["runs"] for record in shown()[0]] == [2]


def test_the_folder_of_a_real_set_parts_runs_unless_it_is_said_not_to(run, shown):
    for seed, root in enumerate(("/data/imagenet", "/data/other")):
        run("backbone=deit_t", "data=imagenet", f"data.root={root}", seed=seed)
    assert [record["runs"] for record in shown()[0]] == [1, 1]
    assert [record["runs"] for record in shown("free=data.root")[0]] == [2]


def test_a_seed_that_was_run_twice_counts_once(run, shown):
    first = run("backbone=deit_t", metrics={"top1": 10.0})
    run("backbone=deit_t", metrics={"top1": 30.0})
    records, err = shown()
    assert (records[0]["runs"], records[0]["top1"]) == (1, 30.0)
    assert f"{first} is left out" in err


def test_unfinished_failed_and_broken_runs_are_named(run, shown):
    run("backbone=deit_t")
    cut = run("backbone=deit_t", seed=1, finished=False)
    (cut / "metrics.csv").write_text("step,epoch,train/loss\n4,0,1.5\n9,1,1.2\n14,1")
    failed = run("backbone=deit_t", seed=2, finished=False)
    with pytest.raises(ValueError, match="the loss"), failure_noted(failed):
        raise ValueError("the loss is nan\nat once")
    half = run("backbone=deit_t", seed=3)
    (half / "summary.json").write_text('{"metrics": {"top1": 1')
    yaml_broken = run("backbone=deit_t", seed=4)
    (yaml_broken / "config.yaml").write_text("a: [1")
    nan = run("backbone=deit_t", seed=5, metrics={"top1": float("nan")})
    lacking = run("backbone=deit_t", seed=6)
    (lacking / "summary.json").write_text('{"metrics": {"top1": 1}}')
    odd = run("backbone=deit_t", seed=7, finished=False)
    (odd / "metrics.csv").write_bytes(b"\xff\xfe\x00")
    run("backbone=deit_t", "mode=test", f"ckpt={__file__}")
    records, err = shown()
    assert [record["runs"] for record in records] == [1]
    lines = err.splitlines()
    said = {folder: next(line for line in lines if str(folder) in line)
            for folder in (cut, failed, half, yaml_broken, nan, lacking, odd)}  # fmt: skip
    assert "not finished: logged last at step 9, epoch 2 of" in said[cut]
    assert said[failed].endswith("failed: the loss is nan")
    assert "summary.json cannot be read" in said[half]
    assert "config.yaml cannot be read" in said[yaml_broken]
    assert said[nan].endswith("failed: top1 is no number")
    assert "summary.json lacks parameters" in said[lacking]
    assert "metrics.csv cannot be read" in said[odd]
    assert "1 evaluations (mode=validate, test or predict) are left out" in err


def test_going_on_takes_the_note_of_a_failure_away(tmp_path):
    with pytest.raises(ZeroDivisionError), failure_noted(tmp_path):
        1 / 0  # noqa: B018
    with failure_noted(tmp_path):
        assert not list(tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt), failure_noted(tmp_path):
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


@pytest.fixture
def published(run):
    """Two seeds of an experiment on its real data, and one with fewer epochs."""
    row = next(r for r in load_rows("afbo", "classification")
               if (str(r), r.table) == ("deit_t_afbo", 2))  # fmt: skip
    own = ("experiment=afbo_t2_deit_t_afbo", "data.root=/data/imagenet")
    for seed, top1 in enumerate((74.2, 74.4)):
        run(*own, seed=seed, metrics={"top1": top1}, parameters=row.params, macs=row.macs * 1e9)
    return lambda *more: run(*own, *more, seed=5, metrics={"top1": 60.0}, parameters=row.params)


def test_a_published_row_is_compared_with_the_paper(published, shown):
    records, err = shown()
    assert err == ""
    assert (records[0]["top1_paper"], records[0]["paper"]) == (74.6, "AFBO Table 2")
    assert records[0]["top1_difference"] == pytest.approx(-0.3)


def test_another_run_than_the_published_one_is_not_compared(published, run, shown):
    published("trainer.max_epochs=10")
    run("backbone=deit_t_afbo", "paper={name: afbo, table: 2}", seed=6)
    run("experiment=afbo_t2_swin_t_afbo", "data.root=/data/imagenet", parameters=28000000)
    records, err = shown()
    assert sorted(record["top1_paper"] or 0 for record in records) == [0, 0, 0, 74.6]
    assert "trainer.max_epochs=10 instead of 300" in err
    assert "28000000 parameters instead of 27940450, so another model or classes" in err


@pytest.mark.parametrize("form", ["markdown", "latex", "csv", "table"])
def test_formats(form, run, tmp_path, capsys):
    run("backbone=deit_t", metrics={"top1": 61.25})
    run("backbone=swin_t", "task=segmentation", metrics={"mIoU": 41.5})
    out = tmp_path / "table.txt"
    assert results.main([str(tmp_path / "outputs"), f"format={form}", f"out={out}"]) == 0
    text, printed = out.read_text(), capsys.readouterr().out
    assert printed == ""
    for word in ("61.25", "41.5", "mIoU"):
        assert word in text
    parts = {"markdown": "| deit_t | 1 | 61.25 | - |", "latex": r"deit\_t & 1 & 61.25 & - &",
             "csv": "classification,deit_t,,1,61.25,,", "table": "task=segmentation\n"}  # fmt: skip
    assert parts[form] in text


@pytest.mark.parametrize("cost", ["params", "macs"])
def test_plot(cost, published, run, tmp_path, capsys):
    run("backbone=deit_t", "data=imagenet", "data.root=/x", metrics={"top1": 72.0}, macs=2e8)
    path = tmp_path / "plot.png"
    assert results.main([str(tmp_path / "outputs"), f"plot={cost}", f"out={path}"]) == 0
    err = capsys.readouterr().err
    assert f"plot: {path}" in err
    assert "no points of papers" not in err
    assert matplotlib.image.imread(path).std() > 0.02


@pytest.fixture
def gone():
    """Lets a mixer leave the registry, and with it the backbones that are named after it."""
    with temporary_registrations():
        yield mixers().pop


@pytest.mark.parametrize("cost", rest_slow(["params", "macs"], ["params"]))
def test_a_backbone_that_is_gone_keeps_its_own_point(cost, published, run, gone, tmp_path, capsys):
    published()
    run("backbone=deit_t_afbo", "data=imagenet", "data.root=/x", "paper={name: afbo, table: 2}")
    run("backbone=deit_t", "data=imagenet", "data.root=/x", metrics={"top1": 72.0}, macs=2e8)
    gone("afbo")
    path = tmp_path / "plot.svg"
    options = [f"plot={cost}", f"out={path}", "by=backbone,data.root"]
    assert results.main([str(tmp_path / "outputs"), *options]) == 0
    out, err = capsys.readouterr()
    assert "deit_t_afbo" in out
    missing = "this checkout has no backbone deit_t_afbo"
    assert err.count(f"not compared with afbo, Table 2: {missing}\n") == 2
    assert err.count(f"{missing}: its points are its runs' alone\n") == 1
    drawn = path.read_text()
    for name in ("deit_t", "deit_t_afbo"):  # in the legend
        assert drawn.count(f"<!-- {name} -->") == 1
    for name in ("deit_t /x", "deit_t_afbo /x", "deit_t_afbo /data/imagenet"):  # at their points
        assert drawn.count(f"<!-- {name} -->") == 1


def test_a_backbone_that_is_gone_is_not_timed(run, gone, tmp_path, capsys):
    folder = run("backbone=deit_t_afbo", "backbone.img_size=64")
    run("backbone=deit_t", "backbone.img_size=64")
    gone("afbo")
    options = ["plot=latency", f"out={tmp_path / 'plot.png'}"]
    assert results.main([str(tmp_path / "outputs"), *options]) == 0
    text = "deit_t_afbo is left out of the plot, it cannot be timed: there is no backbone called"
    assert text in capsys.readouterr().err
    assert (tmp_path / "plot.png").is_file()
    assert results.main([str(folder), *options]) == 2
    assert "pass plot=params or plot=macs" in capsys.readouterr().err


def test_latency_is_measured_here(run, tmp_path, capsys):
    run("backbone=deit_t", "backbone.img_size=64")
    assert results.main([str(tmp_path / "outputs"), "plot=latency"]) == 0
    path = tmp_path / "outputs/classification/deit_t/results_classification_latency.png"
    assert path.is_file()
    assert "timed with" in capsys.readouterr().err


def test_pareto_line():
    assert pareto([(2, 5), (1, 3), (3, 4), (1, 2), (4, 6)]) == [1, 0, 4]


def test_wrong_arguments_are_one_sentence(run, shown, tmp_path, capsys):
    run("backbone=deit_t", finished=False)
    assert shown()[1].splitlines()[-1] == (
        "results.py: none of 1 runs is a finished training run"
    )  # fmt: skip
    run("backbone=deit_t")
    assert "did you mean optimizer.lr" in shown("by=optimizer.lrr")[1]
    assert "did you mean metric=?" in shown("metrix=top1")[1]
    assert results.main([str(tmp_path / "nowhere")]) == 2
    assert results.main([str(tmp_path)]) == 0
    (tmp_path / "empty").mkdir()
    assert results.main([str(tmp_path / "empty")]) == 2
    assert "no run folder in" in capsys.readouterr().err


def test_headlines_are_those_of_the_tasks():
    assert {task: cls.headline[0] for task, cls in TASK.items()} == HEADLINE


def test_help_says_all_keys(capsys):
    assert results.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"{key}=" in text for key in results.DEFAULTS)


def test_a_real_run_is_in_the_table(trained, outputs, capsys):
    trained("classification")
    folder = Path(outputs / "classification" / "deit_t" / "latest")
    assert results.main([str(folder), "format=json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    own = json.loads((folder / "summary.json").read_text())
    assert record["top1"] == pytest.approx(own["metrics"]["top1"], abs=1e-6)
