"""Run folders and exports of earlier commits open with today's code, as their users open them.

write.py made the archive. Only public names appear here: the commands, ``tasks.load``, the names
that a README of an export has, and every ``_target_`` of a config.
"""

import json
import pkgutil
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import yaml

from tasks.engine.run_folder.earlier_releases import current_target
from tests.families import rest_slow
from tests.old_runs import opening
from tests.old_runs.narrow import narrow_models
from tests.runs import completed, summary
from tools import results

ARCHIVE = Path(__file__).parent / "old_runs.tar.xz"
COMMITS = ("edfaab3", "2132bf5")
TASKS = ("classification", "transfer", "detection", "segmentation")
SHOWN = dict(zip(TASKS, ("top1", "top1", "AP", "mIoU"), strict=True))
CHECKPOINTS = {"finished": "best", "unfinished": "last"}
QUICK = ("timm", "onnx", "torch_export", "mmpretrain")


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("old_runs")
    with tarfile.open(ARCHIVE) as file:
        file.extractall(folder, filter="data")
    return folder


@pytest.fixture(params=COMMITS)
def old(request, unpacked, monkeypatch):
    from timm.models import _registry

    for name, model in narrow_models().items():
        monkeypatch.setitem(_registry._model_entrypoints, name, model)
    return unpacked / request.param


@pytest.fixture
def answers(old):
    return json.loads((old / "answers.json").read_text())


def configs(folder):
    return {path.parent: yaml.safe_load(path.read_text())
            for path in sorted((folder / "runs").glob("*/*/config.yaml"))}  # fmt: skip


def targets(value):
    if isinstance(value, dict):
        if "_target_" in value:
            yield value["_target_"]
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from targets(item)


def test_every_target_of_old_configs_resolves(old):
    named = {target for config in configs(old).values() for target in targets(config)}
    listed = json.loads((old / "targets.json").read_text())
    assert named <= set(listed)
    assert len(listed) >= 25
    for target in listed:
        assert callable(pkgutil.resolve_name(current_target(target))), target


def test_results_lists_old_runs(old, capsys):
    assert len(configs(old)) == 2 * len(TASKS)
    assert results.main([str(old / "runs"), "format=json"]) == 0
    printed = capsys.readouterr()
    rows = {row["task"]: row for row in json.loads(printed.out)}
    assert rows.keys() == set(TASKS)
    for task, row in rows.items():
        metrics = summary(old / "runs" / task / "finished")["metrics"]
        assert row[SHOWN[task]] == pytest.approx(metrics[SHOWN[task]])
        assert f"{task}/unfinished not finished" in printed.err


@pytest.mark.parametrize("state", rest_slow(CHECKPOINTS, ["finished"]))
@pytest.mark.parametrize("task", TASKS)
def test_an_old_run_predicts_as_it_did(task, state, old, answers):
    from tasks import load

    checkpoint = old / "runs" / task / state / "checkpoints" / f"{CHECKPOINTS[state]}.ckpt"
    (now,) = load(checkpoint).predict(str(old / "image.png"))
    check_same(now, answers["runs"][f"{task}/{state}"])


def check_same(now, then):
    """Compare the answers of any task; scores and pixels near a tie may change places."""
    assert now.keys() == {"input" if key == "image" else key for key in then}
    if "detections" in then:
        scores = [sorted(one["score"] for one in answer["detections"]) for answer in (now, then)]
        np.testing.assert_allclose(*scores, rtol=1e-3)
    elif "labels" in then:
        assert (np.asarray(now["labels"]) == np.asarray(then["labels"])).mean() > 0.99
    else:
        assert now["classes"] == then["classes"]
        np.testing.assert_allclose(now["probabilities"], then["probabilities"], rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_an_old_run_is_tested(task, old, tmp_path, capsys, sample_cache):
    run = old / "runs" / task / "finished"
    typed = ["mode=test", f"ckpt={run}", "trainer=cpu", f"output_dir={tmp_path}"]
    ended = completed(typed, capsys)
    then = summary(run)["metrics"]
    now = summary(ended.folder())["metrics"]
    assert now[SHOWN[task]] == pytest.approx(then[SHOWN[task]], abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_an_old_run_goes_on(task, old, tmp_path, capsys, sample_cache, monkeypatch):
    run = shutil.copytree(old / "runs" / task / "unfinished", tmp_path / "run")
    monkeypatch.chdir(old)  # paths in its command are relative
    typed = yaml.safe_load((run / "config.yaml").read_text())["overrides"]
    completed([*typed, f"ckpt={run}", "resume=true"], capsys)
    assert summary(run).get("finished", True)
    assert (run / "checkpoints" / "best.ckpt").exists()


@pytest.mark.parametrize("target", rest_slow(opening.OPENERS, QUICK))
def test_an_old_export_opens_and_computes_as_it_did(target, old, answers):
    if target.startswith("mm"):
        pytest.importorskip(target.partition("_")[0])
    outputs = opening.OPENERS[target](old / "exports" / target)
    then = answers["exports"][target]
    now = outputs if "standalone" in target else json.loads(opening.as_json(outputs))
    assert [shape for shape, _ in now] == [shape for shape, _ in then]
    for (_, one), (_, other) in zip(now, then, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
