"""Run folders and exports of earlier commits open with today's code, as their users open them.

write.py made the archives. Only public names appear here: the commands, ``tasks.load``, the names
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

from tests.old_runs import opening
from tests.old_runs.narrow import narrow_models
from tests.runs import run_here, summary
from tools import results

HERE = Path(__file__).parent
COMMITS = tuple(sorted(path.name.removesuffix(".tar.xz") for path in HERE.glob("*.tar.xz")))
TASKS = ("classification", "transfer", "detection", "segmentation")
SHOWN = dict(zip(TASKS, ("top1", "top1", "AP", "mIoU"), strict=True))
CHECKPOINTS = {"finished": "best", "unfinished": "last"}
QUICK = ("timm", "onnx", "torch_export", "mmpretrain")


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """Commit -> the folder of its archive, unpacked once."""
    folders = {}

    def unpack(commit):
        if commit not in folders:
            folders[commit] = tmp_path_factory.mktemp(commit)
            with tarfile.open(HERE / f"{commit}.tar.xz") as file:
                file.extractall(folders[commit], filter="data")
        return folders[commit]

    return unpack


@pytest.fixture(params=COMMITS)
def old(request, unpacked, monkeypatch):
    """The folder of a commit, with timm as it was when the archive was made."""
    from timm.models import _registry

    for name, model in narrow_models().items():
        monkeypatch.setitem(_registry._model_entrypoints, name, model)
    return unpacked(request.param)


@pytest.fixture
def answers(old):
    return json.loads((old / "answers.json").read_text())


def configs(folder):
    return {path.parent: yaml.safe_load(path.read_text())
            for path in sorted((folder / "runs").glob("*/*/config.yaml"))}  # fmt: skip


def targets(value):
    """Yield each ``_target_`` anywhere in a config."""
    if isinstance(value, dict):
        if "_target_" in value:
            yield value["_target_"]
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from targets(item)


def test_archives_of_two_commits_have_every_task():
    assert len(COMMITS) == 2


def test_every_target_of_old_configs_resolves(old):
    named = {target for config in configs(old).values() for target in targets(config)}
    listed = json.loads((old / "targets.json").read_text())
    assert named <= set(listed)
    assert len(listed) >= 25
    for target in listed:
        assert callable(pkgutil.resolve_name(target)), target


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


@pytest.mark.parametrize("state", CHECKPOINTS)
@pytest.mark.parametrize("task", TASKS)
def test_an_old_run_predicts_as_it_did(task, state, old, answers):
    from tasks import load

    checkpoint = old / "runs" / task / state / "checkpoints" / f"{CHECKPOINTS[state]}.ckpt"
    (now,) = load(checkpoint).predict(str(old / "image.png"))
    check_same(now, answers["runs"][f"{task}/{state}"])


def check_same(now, then):
    """Compare two predictions, whose dicts, lists and numbers are nested."""
    if isinstance(then, dict):
        assert now.keys() == then.keys()
        for key in then.keys() - {"image"}:
            check_same(now[key], then[key])
    elif isinstance(then, str | None):
        assert now == then
    elif isinstance(then, list) and any(isinstance(item, dict) for item in then):
        assert len(now) == len(then)
        for one, other in zip(now, then, strict=True):
            check_same(one, other)
    else:
        np.testing.assert_allclose(now, then, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_an_old_run_is_tested(task, old, tmp_path, capsys, sample_cache):
    run = old / "runs" / task / "finished"
    typed = ["mode=test", f"ckpt={run}", "trainer=cpu", f"output_dir={tmp_path}"]
    ended = run_here(typed, capsys)
    assert ended.status == 0, ended.err
    then = summary(run)["metrics"]
    now = summary(ended.folder())["metrics"]
    assert now[SHOWN[task]] == pytest.approx(then[SHOWN[task]], abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_an_old_run_goes_on(task, old, tmp_path, capsys, sample_cache, monkeypatch):
    run = shutil.copytree(old / "runs" / task / "unfinished", tmp_path / "run")
    monkeypatch.chdir(old)  # paths in its command are relative
    typed = yaml.safe_load((run / "config.yaml").read_text())["overrides"]
    ended = run_here([*typed, f"ckpt={run}", "resume=true"], capsys)
    assert ended.status == 0, ended.err
    assert summary(run).get("finished", True)
    assert (run / "checkpoints" / "best.ckpt").exists()


def rest_slow_targets():
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
            for name in opening.OPENERS]  # fmt: skip


@pytest.mark.parametrize("target", rest_slow_targets())
def test_an_old_export_opens_and_computes_as_it_did(target, old, answers):
    if target.startswith("mm"):
        pytest.importorskip(target.partition("_")[0])
    outputs = opening.OPENERS[target](old / "exports" / target)
    then = answers["exports"][target]
    now = outputs if "standalone" in target else json.loads(opening.as_json(outputs))
    assert [shape for shape, _ in now] == [shape for shape, _ in then]
    for (_, one), (_, other) in zip(now, then, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
