"""mode=test on robustness sets: figures by the protocols, cached parts, output."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
import yaml

from datamodules import RobustnessDataModule
from datamodules.corruptions import KINDS
from datamodules.corruptions.copies import NOTE, CopyOptions, write_copy
from datamodules.images.robustness_sets import SYNSETS
from tasks.classification.corruption_error import ALEXNET, corruption_errors, mean_corruption_error
from tasks.classification.task import ClassificationTask
from tests.runs import RECIPE, completed, composed, run_here, summary
from tests.stand_ins import write_c, write_classes, write_subset, write_v2
from tools.comparing.paper_figures import compare_with_row
from tools.config import run_config
from tools.config.config_checks import resolve_config
from tools.papers.experiments import find_experiment
from tools.runs import robustness_mode as robustness
from tools.runs.report import compare_with_paper

PUBLISHED = (0.886428, 0.894468, 0.922640, 0.819880, 0.826268, 0.785948, 0.798360, 0.866816,
             0.826572, 0.819324, 0.564592, 0.853204, 0.646056, 0.717840, 0.606500)  # fmt: skip


pytestmark = pytest.mark.usefixtures("backbones_are_options")


def as_errors(table, factor=1.0):
    return {kind: {s: factor * e for s, e in enumerate(row, 1)} for kind, row in table.items()}


def test_mean_corruption_error():
    assert tuple(ALEXNET) == KINDS
    means = [sum(row) / 5 for row in ALEXNET.values()]
    assert means == pytest.approx(PUBLISHED, abs=1e-12)
    errors = as_errors(ALEXNET)
    assert mean_corruption_error(errors) == pytest.approx(100, abs=1e-9)
    assert mean_corruption_error(as_errors(ALEXNET, 0.5)) == pytest.approx(50, abs=1e-9)
    # Errors are averaged over severities first, then over kinds after the division.
    flat = {kind: dict.fromkeys(range(1, 6), 0.4) for kind in KINDS}
    expected = sum(40 / mean for mean in PUBLISHED) / 15
    assert mean_corruption_error(flat) == pytest.approx(expected)
    assert corruption_errors(flat)["fog"] == pytest.approx(40 / 0.819324)
    del errors["fog"][3]
    assert mean_corruption_error(errors) is None
    assert corruption_errors(errors).keys() == set(KINDS) - {"fog"}


def test_predictions_among_some_classes():
    model = torch.nn.Linear(1, 1)
    model.predict = lambda batch: batch["image"]
    task = ClassificationTask(model, "abcd", **RECIPE)
    logits = torch.tensor([[9.0, 1.0, 2.0, 3.0], [0.0, 5.0, 4.0, 1.0]])
    # Among classes 2 and 3, the best are 3 and 2: the argmax over the columns of the classes.
    batch = {"image": logits, "label": torch.tensor([3, 2])}
    for classes, top1 in (((), 0), ((2, 3), 100), ((), 0)):
        task.only_classes(classes)
        task.reset_metrics()
        task.validation_step(batch, 0)
        assert float(task.compute_metrics()["top1"]) == top1
    assert torch.isfinite(task.loss_sum.compute())


@pytest.fixture
def sets(tmp_path):
    write_c(tmp_path / "data/imagenet-c", SYNSETS[:2])
    for name in ("imagenet_a", "imagenet_r"):
        write_subset(tmp_path / "data" / name.replace("_", "-"), name)
    write_v2(tmp_path / "data/imagenetv2-matched-frequency-format-val")
    write_classes(tmp_path / "data/imagenet/val", SYNSETS)
    return tmp_path / "data"


def config_for(sets, tmp_path, *more):
    (tmp_path / "weights.pth").write_bytes(b"weights")
    return composed("mode=test", "data=robustness", f"data.root={sets}", "backbone=swin_t_afbo",
                    f"ckpt={tmp_path / 'weights.pth'}", "data.published_counts=false",
                    "data.num_workers=0", *more)  # fmt: skip


@pytest.fixture
def measured(sets, tmp_path, monkeypatch, capsys):
    """Measure with AlexNet's errors on ImageNet-C and 40 % accuracy elsewhere."""
    asked = []

    def run(folder, config=None, stop_after=None, root=sets):
        config = config or config_for(sets, tmp_path)
        data = RobustnessDataModule(root, published_counts=False, image_size=32, num_workers=0)
        data.setup()
        chosen = []

        def evaluate(engine, mode, task, datamodule):
            if stop_after is not None and len(asked) == stop_after:
                raise KeyboardInterrupt
            name = datamodule.dataset("val").describe(0)
            asked.append(name)
            part = next(p for p in data.parts if str(p.folder / p.files[0]) == name
                        and p.columns == chosen[-1])  # fmt: skip
            _, *place = part.name.split("/")
            wrong = ALEXNET[place[0]][int(place[1]) - 1] if len(place) == 2 else 0.6
            return {"top1": 100 * (1 - wrong), "loss": 1.0}

        monkeypatch.setattr(robustness.trainer, "evaluate", evaluate)
        task = SimpleNamespace(only_classes=lambda columns=(): chosen.append(columns))
        folder.mkdir(parents=True)
        asked.clear()
        found = robustness.measure(SimpleNamespace(is_global_zero=True), task, data, config, folder)
        assert chosen[-1] == ()
        return found, len(asked), capsys.readouterr().out

    return run


def test_figures_by_the_protocols(measured, tmp_path):
    found, count, out = measured(tmp_path / "runs/a")
    assert count == 75 + 6
    assert found["mce"] == pytest.approx(100)
    assert found["ce_fog"] == pytest.approx(100)
    others = {"top1", "in_a", "in_r", "in_v2", "top1_on_a", "top1_on_r"}
    assert {name: found[name] for name in others} == dict.fromkeys(others, pytest.approx(40))
    lines = {line.split("│")[1].strip(): line.split("│")[2].strip() for line in out.splitlines()
             if line.count("│") == 3}  # fmt: skip
    assert (lines["mce"], lines["in_a"]) == ("100.00", "40.00")
    assert lines["in_sketch"] == "not found"
    assert "67.47" in out  # AlexNet's error in fog of severity 1


def test_incomplete_sets_lack_an_average(measured, sets, tmp_path):
    shutil.rmtree(sets / "imagenet-c/fog/3")
    shutil.rmtree(sets / "imagenet-a" / SYNSETS[6])
    found, count, out = measured(tmp_path / "runs/a")
    assert count == 74 + 5
    assert not {"mce", "in_a", "ce_fog"} & found.keys()
    assert found["ce_snow"] == pytest.approx(100)
    assert "incomplete: no imagenet_c/fog/3" in out
    assert "incomplete: no images of 1 classes" in out
    assert "missing" in next(line for line in out.splitlines() if "│ fog " in line)


def test_finished_parts_are_cached(measured, sets, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        measured(tmp_path / "runs/a", stop_after=30)
    kept = json.loads((tmp_path / "runs/a/robustness.json").read_text())
    assert len(kept["parts"]) == 30
    found, count, _ = measured(tmp_path / "runs/b")
    assert count == 81 - 30
    assert found["mce"] == pytest.approx(100)
    assert measured(tmp_path / "runs/c")[1] == 0


def beside(config, parameters, **metrics):
    return compare_with_row(config, {"metrics": metrics, "parameters": parameters})


def on_sets(folder, *typed, ckpt=None, data="robustness"):
    (folder / "weights.pth").write_bytes(b"weights")
    folder = folder / "sets"
    folder.mkdir(exist_ok=True)
    return composed("mode=test", f"data={data}", f"data.root={folder}",
                    f"ckpt={ckpt or folder.parent / 'weights.pth'}", *typed)  # fmt: skip


OURS = {"top1": 82.0, "mce": 57.4, "in_a": 26.5, "in_r": 45.8, "ce_fog": 50.0}


def test_the_papers_line_stands_in_the_closing_table(tmp_path):
    row = find_experiment("afbo_t2_swin_t_afbo")
    found = beside(on_sets(tmp_path, "backbone=swin_t_afbo"), row.params, **OURS)
    assert (found["row"], found["experiment"]) == ("AFBO Table 2", "afbo_t2_swin_t_afbo")
    assert "why_not" not in found
    assert list(found["metrics"]) == ["top1", "mce", "in_a", "in_r", "in_sketch"]
    assert found["metrics"]["mce"] == {"paper": 56.4, "ours": 57.4,
                                       "difference": pytest.approx(1.0)}  # fmt: skip
    assert found["metrics"]["in_sketch"] == {"paper": 31.7, "ours": None}
    shown = compare_with_paper({"task": "classification", "paper": found})
    assert shown["AFBO Table 2, mce (lower is better)"] == "paper 56.4, ours 57.4, difference +1"
    assert shown["AFBO Table 2, in_a"] == "paper 26, ours 26.5, difference +0.5"
    assert shown["AFBO Table 2, in_sketch"] == "paper 31.7, ours none"
    alone = beside(on_sets(tmp_path, "backbone=swin_t_afbo", data="imagenet_r"), row.params,
                   in_r=45.0)  # fmt: skip
    assert list(alone["metrics"]) == ["in_r"]


def test_a_comparison_needs_the_published_sets(tmp_path):
    params = find_experiment("afbo_t2_swin_t_afbo").params

    def why_not(*typed, count=params):
        return beside(on_sets(tmp_path, "backbone=swin_t_afbo", *typed), count, **OURS)["why_not"]

    assert "not the published sets" in why_not("data.published_counts=false")
    assert "parameters instead of" in why_not(count=params - 990 * 769)
    (tmp_path / "sets" / "imagenet-c").mkdir()
    (tmp_path / "sets" / "imagenet-c" / NOTE).write_text("{}")
    assert "a copy made by tools/corrupt.py" in why_not()


def finished_run(folder, *typed):
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints/best.ckpt").write_bytes(b"")
    (folder / "config.yaml").write_text(yaml.safe_dump(composed(*typed, "data.root=/x").plain()))
    return folder


def test_images_are_prepared_as_in_the_run(tmp_path):
    typed = ("backbone=deit_t", "data=imagenet", "data.image_size=160")
    run = finished_run(tmp_path / "run", *typed, "+data.augmentation.interpolation=bilinear")
    base = ("mode=test", f"ckpt={run}", "data=imagenet_a", "data.root=/a")

    def data(*more):
        return resolve_config(run_config.job_config([*base, *more]))

    config = data()
    assert config.data["image_size"] == config.backbone["img_size"] == 160
    assert config.data["augmentation"]["interpolation"] == "bilinear"
    assert config.data["crop_pct"] == 0.875
    assert "_as_run_" not in config.data
    assert data("data.image_size=192").backbone["img_size"] == 192


@pytest.fixture
def corrupted(trained, sample_cache, tmp_path):
    """Corrupt validation images as in README, three per class."""
    trained("classification")  # creates them
    source = next(path for path in sample_cache.rglob("val") if (path / "0").is_dir())
    for name in source.iterdir():
        (tmp_path / "few" / name.name).mkdir(parents=True)
        for image in sorted(name.iterdir())[:3]:
            shutil.copy(image, tmp_path / "few" / name.name)

    def copied(**options):
        write_copy(tmp_path / "few", tmp_path / "c", CopyOptions(size=64, resize=64, **options))
        return tmp_path / "c"

    return copied


def on_copy(folder, corrupted, output_dir, trainer="cpu"):
    return ["mode=test", "data=imagenet_c", f"data.root={corrupted}", f"ckpt={folder}",
            f"trainer={trainer}", "data.num_workers=0", "data.eval_batch_size=7",
            f"output_dir={output_dir}"]  # fmt: skip


@pytest.mark.slow
def test_a_copy_of_the_sample_data(trained, corrupted, tmp_path, capsys):
    folder = trained("classification").folder()
    assert yaml.safe_load((folder / "config.yaml").read_text())["data"]["image_size"] == 64
    typed = on_copy(folder, corrupted(), tmp_path / "out")
    ended = completed(typed, capsys)
    metrics = summary(ended.folder())["metrics"]
    assert 0 < metrics["mce"] < 200
    parts = json.loads((ended.folder() / "robustness.json").read_text())["parts"]
    assert len(parts) == 75
    assert list((ended.folder() / "preview").glob("*.png"))
    assert summary(run_here(typed, capsys).folder())["metrics"] == metrics
    assert run_here([*typed, "mode=fit"], capsys).status == 2
