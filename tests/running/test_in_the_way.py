"""Folders, files and links at the paths of a run's files, and full disks."""

import errno
import json
import os
from types import SimpleNamespace

import pytest

from datamodules.files.cache import sample_folder
from tasks.classification.task import ClassificationTask
from tests.running.tiny import tiny_task
from tools.cli.errors import user_message
from tools.comparing.run_records import read_run
from tools.runs import folder as run_folder
from tools.runs import report

KNOWN = {
    "mode": "fit", "strategy": "auto", "task": "classification", "backbone": "deit_t",
    "metrics": {"top1": 1.0}, "parameters": 1, "backbone_parameters": 1, "backbone_macs": 1,
    "macs_at": [8, 8], "seconds": 1.0,
}  # fmt: skip
DATA = SimpleNamespace(preview_batch=lambda count: {})
PNG = b"\x89PNG\r\n\x1a\n..."


def put(path, what):
    """Create a folder, file, pipe or link to a foreign folder at a path."""
    if what == "folder":
        path.mkdir()
        (path / "mine").touch()
    elif what == "file":
        path.write_text("mine")
    elif what == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(path.parent.parent)


@pytest.mark.parametrize("what", ["folder", "file", "pipe"])
def test_latest_is_replaced_only_if_it_is_a_link(what, tmp_path, caplog):
    (tmp_path / "run").mkdir()
    put(tmp_path / "latest", what)
    with caplog.at_level("INFO"):
        run_folder.mark_latest(tmp_path / "run")
    assert "latest is not a link to a run and stays unchanged" in caplog.text
    assert not (tmp_path / "latest").is_symlink()
    assert {path.name for path in tmp_path.iterdir()} == {"run", "latest"}


@pytest.mark.parametrize("name", ["set-v5", ".set-v5.lock", ""])
@pytest.mark.parametrize("what", ["folder", "file", "pipe"])
def test_foreign_files_at_the_path_of_sample_data_stay(name, what, tmp_path, monkeypatch):
    monkeypatch.setattr("datamodules.files.cache.GENERATOR_VERSION", 5)
    base = tmp_path / "cache"
    if name:
        base.mkdir()
    put(base / name if name else base, what)
    if (what == "folder") != name.endswith(".lock"):  # it fits
        assert sample_folder(base, "set", lambda path: (path / "a").touch()).is_dir()
        return
    with pytest.raises(ValueError, match=r"is not a folder of sample data; |cannot be written to"):
        sample_folder(base, "set", lambda path: (path / "a").touch())
    assert (base / name).exists()


FULL = OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_removes_half_of_sample_data(tmp_path):
    def fill(path):
        (path / "a").touch()
        raise FULL

    with pytest.raises(ValueError, match=r"cannot be written to .*No space left on device"):
        sample_folder(tmp_path, "set", fill)
    assert [path.suffix for path in tmp_path.iterdir()] in ([".lock"], [])


@pytest.fixture
def closing(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.csv").write_text("step,train/loss\n0,1.0\n1,0.5\n")
    draw(monkeypatch)

    def close():
        task = tiny_task()
        task.class_figures = [{"class": "a", "IoU": 1.0}]
        report.write(folder, KNOWN, task, DATA)

    return folder, close


def draw(monkeypatch):
    """Let the task draw one picture, of data that need not exist."""
    drawn = SimpleNamespace(save=lambda file, form: file.write(PNG))
    monkeypatch.setattr(ClassificationTask, "preview", lambda *_: [drawn])


WRITTEN = {"curves.png", "preview", "classes.csv", "summary.json", "metrics.csv"}


@pytest.mark.parametrize("name", sorted(WRITTEN - {"metrics.csv"}))
def test_a_blocked_result_leaves_the_others(name, closing, capsys):
    folder, close = closing
    put(folder / name, "file" if name == "preview" else "folder")
    with pytest.raises(OSError, match=name) as caught:
        close()
    assert user_message(caught.value) == str(caught.value)
    assert {path.name for path in folder.iterdir()} == WRITTEN
    assert "top1" in capsys.readouterr().out
    for other in ("curves.png", "classes.csv", "summary.json"):
        assert (folder / other).is_file() == (other != name)


def test_a_run_stopped_by_a_signal_has_an_unfinished_summary(tmp_path, monkeypatch):
    draw(monkeypatch)
    (tmp_path / "metrics.csv").write_text("step,epoch,train/loss\n0,0,1.0\n1,0,0.5\n")
    config = {"task_name": "classification", "backbone": {"name": "deit_t"}}
    config |= {group: {"_target_": "x.Y"} for group in ("head", "data", "task")}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    trainer = SimpleNamespace(global_step=2, callback_metrics={"val/top1": 0.5, "train/loss": 1.0})
    report.write_stopped(tmp_path, KNOWN, trainer, tiny_task(), DATA)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["finished"], summary["step"]) == (False, 2)
    assert (summary["metrics"], summary["validation"]) == ({}, {"top1": 0.5})
    assert (tmp_path / "curves.png").is_file()
    assert (tmp_path / "preview" / "00.png").is_file()
    assert not report.log_finished(tmp_path, {})
    assert read_run(tmp_path).status == "unfinished"
