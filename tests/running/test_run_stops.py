"""Runs that are stopped, killed or resumed, and what cannot be resumed."""

import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
import yaml

from tasks.engine.callbacks.loggers import read_rows
from tasks.engine.checkpoints.files import AtomicCheckpointIO
from tasks.engine.run_folder.run_config import RunConfig
from tests.families import rest_slow
from tests.runs import (
    arguments,
    command,
    completed,
    run_here,
    same,
    start,
    summary,
    wait_for,
    weights,
)
from tools.cli.errors import user_message
from tools.runs import folder as run_folder
from tools.runs.outcome import explaining_full_memory

pytestmark = pytest.mark.usefixtures("sample_cache")


def training(typed, output_dir, pattern="tensorboard/*"):
    """Start a run of a classifier; return the process and its parent folder once it trains."""
    process, parent = start(typed), output_dir / "classification" / "deit_t"
    wait_for(process, lambda: list(parent.glob(f"2*/{pattern}")))
    return process, parent


@pytest.mark.slow
def test_a_stopped_and_killed_run_ends_like_an_unbroken_one(tmp_path, capsys, caplog, one_thread):
    """SIGTERM in the first epoch, kill -9 later: resume=true continues exactly each time."""
    # Long enough for the signals; drop path draws from the global generator.
    long = ["++data.train_copies=5", "backbone.drop_path_rate=0.2", "trainer.log_every_n_steps=1"]
    whole = run_here(arguments("classification", tmp_path / "whole", *long, epochs=2), capsys)
    typed = arguments("classification", tmp_path / "broken", *long, epochs=2)
    process, parent = training(typed, tmp_path / "broken")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 143, err
    assert "Traceback" not in err
    assert re.search(r"Stopped after step \d+; to continue, add resume=true", out)

    process = start([*typed, "resume=true"])
    best, last = (parent / "latest" / "checkpoints" / f"{name}.ckpt" for name in ("best", "last"))
    wait_for(process, lambda: best.is_file() and last.stat().st_mtime > best.stat().st_mtime)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=300)
    assert not (parent / "latest" / "summary.json").exists()

    ended = completed([*typed, "resume=true"], capsys)
    assert len(list(parent.iterdir())) == 2  # one run and the link to it
    assert same(weights(ended.folder()), weights(whole.folder()))
    assert same(weights(ended.folder(), "best"), weights(whole.folder(), "best"))
    assert summary(ended.folder())["metrics"] == summary(whole.folder())["metrics"]
    rows, expected = (read_rows(run.folder() / "metrics.csv") for run in (ended, whole))
    steps = [row["step"] for row in rows]
    assert rows == [row for row in expected if row["step"] in steps]
    assert len(rows) >= len(expected) - 1  # the step of the SIGTERM goes unlogged

    before = (ended.folder() / "summary.json").read_text()
    with caplog.at_level("INFO"):
        assert run_here([*typed, "resume=true"], capsys).status == 0
    assert "The run is already finished (top1 " in caplog.text
    assert (ended.folder() / "summary.json").read_text() == before


def two_runs(tmp_path, *more):
    long = ["++data.train_copies=8", "backbone.drop_path_rate=0.2", "trainer.log_every_n_steps=1"]
    whole, typed = (
        arguments("classification", tmp_path / name, *long, *more, trainer="ddp_cpu", epochs=2)
        for name in ("whole", "broken")
    )
    return command(whole), typed


def children_of(process):
    pids = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in pids if "run.py" in Path(f"/proc/{pid}/cmdline").read_text()]


@pytest.mark.slow
def test_one_run_at_a_time_and_a_stale_lock_is_replaced(tmp_path):
    """Two processes each, checkpoints by the clock, an end by steps."""
    more = ["checkpoint_every=0.01", "trainer.max_steps=34"]
    whole, typed = two_runs(tmp_path, *more)
    process, _ = training(typed, tmp_path / "broken", "checkpoints/last.previous.ckpt")
    others = children_of(process)
    for pid in (process.pid, *others):
        os.kill(pid, signal.SIGSTOP)  # so that it still trains when the second starts
    second = command([*typed, "resume=true"])
    for pid in (process.pid, *others):
        os.kill(pid, signal.SIGKILL)
    assert second.status == 2
    assert f"is in use by process {process.pid} on" in second.err
    process.communicate(timeout=300)
    assert len(others) == 1
    ended = command([*typed, "resume=true"])
    assert (ended.status, ended.err) == (0, "")
    assert f"from process {process.pid} on" in ended.out
    assert same(weights(ended.folder()), weights(whole.folder()))
    assert read_rows(ended.folder() / "metrics.csv") == read_rows(whole.folder() / "metrics.csv")
    assert not (ended.folder() / "run.lock").exists()


@pytest.fixture
def trained_copy(trained, tmp_path):
    """Return a copy of a finished run, and the command that resumes it."""
    folder = trained("classification").folder()
    copy = shutil.copytree(folder, tmp_path / "classification" / "deit_t" / folder.name)
    return copy, arguments("classification", tmp_path, "resume=true", epochs=2)


class TestRefusedResume:
    @pytest.fixture
    def broken_off(self, trained_copy):
        """Return a run that was killed after its training, and its command."""
        copy, typed = trained_copy
        run_folder.mark_latest(copy)
        (copy / "summary.json").unlink()
        return copy, typed

    def check_refused(self, typed, capsys, *said):
        ended = run_here(typed, capsys)
        assert (ended.status, len(ended.err.splitlines())) == (2, 1)
        assert all(part in ended.err for part in said), ended.err

    def test_other_checkpoints(self, broken_off, capsys):
        folder, typed = broken_off
        last = folder / "checkpoints" / "last.ckpt"
        whole, content = last.read_bytes(), AtomicCheckpointIO().load_checkpoint(last)
        torch.save({"state_dict": weights(folder)}, last)
        said = "weights only and cannot be resumed; pass the run's last"
        self.check_refused(typed, capsys, said)
        last.write_bytes(whole[:1000])
        self.check_refused([*typed, f"ckpt={last}"], capsys, "last.ckpt is truncated")
        config = (folder / "config.yaml").read_text()
        (folder / "config.yaml").write_text(config.replace("max_epochs: 2", "max_epochs: 3"))
        content["position"]["batches_per_epoch"] = 7
        AtomicCheckpointIO().save_checkpoint(content, last)
        said = "had 7 batches in an epoch, now there are 5"
        self.check_refused([*typed, "trainer.max_epochs=3"], capsys, said)

    def test_a_run_that_only_lacks_its_report_writes_it(self, broken_off, capsys, tmp_path):
        """Also without the file that it started from."""
        folder, typed = broken_off
        config = yaml.safe_load((folder / "config.yaml").read_text())
        start = str(tmp_path / "gone" / "best.ckpt")
        config |= {"backbone": config["backbone"] | {"pretrained": start}, "keep_classifier": True}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        before = weights(folder)
        typed += [f"backbone.pretrained={tmp_path}/elsewhere.ckpt", "keep_classifier=true"]
        completed(typed, capsys)
        after = yaml.safe_load((folder / "config.yaml").read_text())
        assert after["backbone"]["pretrained"] == start
        assert same(before, weights(folder))
        assert summary(folder)["metrics"]


def test_half_written_files_are_skipped(trained_copy, trained, capsys):
    """The run resumes from the last good checkpoint and rewrites the summary."""
    copy, typed = trained_copy
    folder = trained("classification").folder()
    for name in ("summary.json", "metrics.csv"):
        (copy / name).write_bytes((folder / name).read_bytes()[:-20])
    last = copy / "checkpoints" / "last.ckpt"
    last.rename(last.with_name("last.previous.ckpt"))
    last.write_text("no checkpoint")
    completed(typed, capsys)
    assert summary(copy)["metrics"].keys() == summary(folder)["metrics"].keys()
    # Training was complete, so the good one stays.
    assert same(weights(copy, "last.previous"), weights(folder))


@pytest.mark.parametrize(
    ("error", "mode", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), "test", "data.eval_batch_size=9; pass a"),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel"), "fit", "pass backbone.grad"),
        (RuntimeError("cublasCreate: CUBLAS_STATUS_ALLOC_FAILED"), "fit", "memory is full with"),
        (RuntimeError("CUDA error: device-side assert triggered"), "fit", None),
    ],
)
def test_errors_of_a_full_gpu(error, mode, said, tmp_path):
    data = {"batch_size": 1, "eval_batch_size": 9}
    trainer = {"accumulate_grad_batches": 4}
    config = RunConfig(
        task_name="", mode=mode, backbone={}, head={}, task={}, data=data, trainer=trainer
    )
    with pytest.raises(RuntimeError if said is None else ValueError, match=said):
        with explaining_full_memory(config, tmp_path):
            raise error
    assert (user_message(error) is None) == (said is None)


@pytest.mark.parametrize("step", rest_slow([2, 7], [7]))  # of epochs of five steps
def test_nan_stops_training_and_keeps_the_last_checkpoint(step, tmp_path, capsys, monkeypatch):
    typed = arguments("classification", tmp_path, epochs=3)
    from heads.linear import LinearClassifier

    steps = iter(range(100))
    loss = LinearClassifier.loss

    def spoiled(self, batch):
        factor = float("nan") if next(steps) == step else 1.0
        return {name: value * factor for name, value in loss(self, batch).items()}

    monkeypatch.setattr(LinearClassifier, "loss", spoiled)
    ended = run_here(typed, capsys)
    assert ended.status == 2
    assert ended.err.startswith(f"error: the loss is nan at step {step}; training stops here, ")
    folder = tmp_path / "classification" / "deit_t" / "latest"
    assert ("the last checkpoint stays" in ended.err) == (step > 5)
    assert ("before the first checkpoint" in ended.err) == (step < 5)
    if step < 5:
        assert not list(folder.rglob("*.ckpt"))
        return
    assert all(value.isfinite().all() for value in weights(folder).values())
    assert torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 5
    assert read_rows(folder / "metrics.csv")
