"""A task family as files only: a number from a signal, lower is better, without classes."""

import csv
import json
import shutil
import signal
import time

import numpy as np
import pytest

from tests.checkout import ROOT, copied, output, start

pytestmark = pytest.mark.slow
TOY = ROOT / "tests/newcomers/toy"
RUN = ("tools/run.py", "task=toy", "trainer=cpu", "logger=csv")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the checkout with the toy's files in it, none of which was there before."""
    copy = copied(tmp_path_factory.mktemp("copy"))
    for file in sorted(TOY.rglob("*.*")):
        target = copy / file.relative_to(TOY)
        if "__pycache__" not in file.parts:
            assert not target.exists()
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
    return copy


def folder_of(out, checkout):
    return checkout / out.strip().splitlines()[-1].removeprefix("Run folder: ")


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def validated(folder):
    rows = csv.DictReader((folder / "metrics.csv").open())
    return [float(row["val/mae"]) for row in rows if row.get("val/mae")]


@pytest.fixture(scope="module")
def trained(checkout):
    """The folder of a run."""
    return folder_of(output(checkout, *RUN, "output_dir=outputs"), checkout)


def test_the_lowest_error_is_the_best_checkpoint(trained):
    found = summary(trained)
    assert found["metrics"]["mae"] == pytest.approx(min(validated(trained)), rel=1e-4)
    assert "classes" not in found["data"]
    assert list(found["data"]["fingerprints"]) == ["val", "train"]
    assert found["macs_at"] == [64]
    assert found["backbone_macs"] == 64 * 16 + 2 * 16 * 16 * 3 * 16
    assert len(list((trained / "preview").glob("*.png"))) == 4


def test_a_killed_run_goes_on(checkout, tmp_path):
    words = (*RUN, f"output_dir={tmp_path}", "data.num_train=2048", "trainer.max_epochs=3")
    started = start(checkout, *words)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("toy/*/2*/checkpoints/last.ckpt")):
        assert started.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    started.send_signal(signal.SIGKILL)
    started.communicate()
    out = output(checkout, *words, "resume=true")
    assert "Going on after step" in out
    folder = folder_of(out, checkout)
    assert summary(folder)["metrics"]["mae"] == pytest.approx(min(validated(folder)), rel=1e-4)
    assert len(validated(folder)) == 3


def test_it_is_tested_and_predicts(checkout, trained, tmp_path):
    out = output(checkout, "tools/run.py", "mode=test", f"ckpt={trained}")
    assert summary(folder_of(out, checkout))["metrics"] == summary(trained)["metrics"]
    np.save(tmp_path / "one.npy", np.zeros(64))
    out = output(checkout, "tools/run.py", "mode=predict", f"ckpt={trained}", f"input={tmp_path}")
    (row,) = json.loads((folder_of(out, checkout) / "predictions.json").read_text())
    assert row.keys() == {"input", "number"}
    assert f"one.npy: {row['number']:.3f}" in out
    code = "import tasks, sys; print(tasks.load(sys.argv[1]).predict(sys.argv[2]))"
    assert str(row["number"]) in output(checkout, "-c", code, str(trained), str(tmp_path))


def test_the_lowest_error_leads_tables_plots_and_searches(checkout, trained):
    output(checkout, *RUN, "output_dir=outputs", "seed=1", "optimizer.lr=1e-5")
    typed = ("tools/results.py", "outputs", "plot=params", "out=plot.png", "format=json")
    rows = json.loads(output(checkout, *typed))
    assert {"mae", "params"} & rows[0].keys() == {"mae"}
    assert (checkout / "plot.png").stat().st_size
    code = (
        "from tools.comparing.table import metric_direction, pareto\n"
        "print(pareto([(1, 0.5), (1, 0.3), (2, 0.4)], metric_direction('toy', 'mae')))"
    )
    assert output(checkout, "-c", code).strip() == "[1]"
    out = output(checkout, "tools/search.py", *RUN[1:], "optimizer.lr=1e-2,1e-5", "trials=2",
                "sampler=random", "output_dir=searched")  # fmt: skip
    first, second = (float(line.split()[1]) for line in out.splitlines()[-4:-2])
    assert first <= second


def test_commands_accept_it(checkout):
    out = output(checkout, "tools/complexity.py", "task=toy", "format=json")
    (counted,) = json.loads(out)
    assert (counted["backbone"], counted["params"]) == ("tiny_conv", 1665)
    typed = ("loop", "task=toy", "backbone=tiny_conv", "rounds=2", "format=json")
    timed = json.loads(output(checkout, "tools/benchmark.py", *typed))
    assert [row["task"] for row in timed] == ["toy", "toy"]
    typed = ("backbones", "backbone=tiny_conv", "rounds=2", "batch=1", "format=json")
    (timed,) = json.loads(output(checkout, "tools/benchmark.py", *typed))
    assert (timed["backbone"], timed["image_size"]) == ("tiny_conv", "64")
    assert "toy" in output(checkout, "tools/doctor.py").splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run.py", "task=toy", "backbone=deit_t"), "deit_t is a backbone for images; pass"),
        (("run.py", "task=classification", "backbone=tiny_conv"), "tiny_conv is a backbone"),
        (("run.py", "task=toy", "keep_classifier=true"), "keep_classifier=true needs head=linear"),
        (("complexity.py", "task=toy", "backbone=swin_t"), "swin_t is a backbone for images"),
        (("complexity.py", "backbone=tiny_conv"), "tiny_conv is a backbone for signals"),
        (("benchmark.py", "backbones", "backbone=tiny_conv,deit_t"), "need different inputs"),
        (("benchmark.py", "backbones", "backbone=tiny_conv", "image_size=64"), "takes signals"),
        (("benchmark.py", "data", "task=toy"), "task must be one of"),
        (("analyse.py", "cam", "ckpt=RUN"), "cam does not apply to task=toy"),
        (("analyse.py", "erf", "backbone=tiny_conv"), "erf does not apply to task=toy"),
        (("export.py", "to=onnx", "ckpt=RUN"), "to=onnx does not take networks of task=toy"),
        (("export.py", "to=timm", "backbone=tiny_conv"), "does not take networks of task=toy"),
        (("lipschitz.py", "backbone=tiny_conv"), "channel mixers of tiny_conv are fixed"),
        (("corrupt.py", "ckpt=RUN", "out=o"), "task=toy, which takes signals"),
        (("annotate.py", "root=.", "out=o", "checkpoint=RUN"), "task=toy"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_in_one_line(checkout, trained, words, said):
    name, *typed = (word.replace("RUN", str(trained)) for word in words)
    started = start(checkout, f"tools/{name}", *typed)
    _, err = started.communicate()
    lines = [line for line in err.splitlines() if line]
    assert started.returncode == 2, err
    assert len(lines) == 1, err
    assert said in lines[0]
