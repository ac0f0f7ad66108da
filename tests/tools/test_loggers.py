"""metrics.csv has one row per step, also after resuming; logs of other programs too."""

import os
import resource
import signal
import time

import pytest

from tasks.engine.callbacks.loggers import CsvLog, read_rows


def test_metrics_of_one_step_share_a_row(tmp_path):
    log = CsvLog(tmp_path / "metrics.csv", flush_every=2)
    for step in (0, 1, 2):
        log.log_metrics({"train/loss": 1.5 - step}, step)
        log.log_metrics({"train/lr": 0.1}, step)
    log.log_metrics({"val/top1": 50.0}, 2)
    log.finalize("success")
    rows = [{"step": step, "train/loss": 1.5 - step, "train/lr": 0.1} for step in (0, 1, 2)]
    rows[2]["val/top1"] = 50.0
    assert read_rows(tmp_path / "metrics.csv") == rows
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]


def test_a_step_that_is_written_already_still_has_one_row(tmp_path):
    """A checkpoint is saved with the log before the validation that follows its last step."""
    path = tmp_path / "metrics.csv"
    log = CsvLog(path)
    log.log_metrics({"train/loss": 2.0}, 0)
    log.log_metrics({"train/loss": 1.0}, 1)
    log.save()
    log.log_metrics({"val/top1": 50.0}, 1)
    log.save()
    log.log_metrics({"train/loss": 0.5}, 2)
    log.save()
    rows = [{"step": step, "train/loss": loss} for step, loss in enumerate((2.0, 1.0, 0.5))]
    rows[1]["val/top1"] = 50.0
    assert read_rows(path) == rows
    log = CsvLog(path)
    log.resume_at(2, validates=True)
    assert read_rows(path) == [rows[0], {"step": 1, "train/loss": 1.0}]
    log.log_metrics({"val/top1": 50.0}, 1)
    log.save()
    assert read_rows(path) == rows[:2]
    with path.open("a") as file:
        file.write("40,1.0")  # by another program
    log.log_metrics({"train/loss": 0.5}, 2)
    log.save()
    assert read_rows(path) == rows


def test_resumed_log_keeps_the_rows_before(tmp_path):
    path = tmp_path / "metrics.csv"
    log = CsvLog(path)
    for step in range(4):
        log.log_metrics({"loss": step / 2}, step)
    log.save()
    with path.open("a") as file:
        file.write("1.0,")  # truncated by a kill
    log = CsvLog(path)
    log.resume_at(2)
    assert [row["step"] for row in read_rows(path)] == [0, 1]
    log.log_metrics({"loss": 9.5}, 2)
    log.save()
    log.log_metrics({"loss": 8.5, "other": 1.5}, 3)
    log.save()
    rows = [{"step": step, "loss": loss} for step, loss in enumerate((0.0, 0.5, 9.5, 8.5))]
    rows[3]["other"] = 1.5
    assert read_rows(path) == rows
    assert read_rows(tmp_path / "absent.csv") == []


def train(log, steps, start=0):
    """Log steps with a validation after each, as a training saves it."""
    for step in range(start, start + steps):
        log.log_metrics({"train/loss": step + 0.25}, step)
        if step % 3:  # else the validation's figures come before the row is written
            log.save()
        log.log_metrics({"val/top1": step + 0.5}, step)
        log.save()
    return [
        {"step": step, "train/loss": step + 0.25, "val/top1": step + 0.5}
        for step in range(start + steps)
    ]


@pytest.mark.parametrize("more", [-1, 3])  # bytes; all of the new row, or its end, is refused
def test_a_full_disk_leaves_the_rows_that_are_written(more, tmp_path, caplog):
    path = tmp_path / "metrics.csv"
    log = CsvLog(path)
    rows = train(log, 3)
    before = path.read_bytes()
    _, most = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + more, most))
        for step in (2, 3):  # in the place of the last row, and behind it
            log.log_metrics({"val/top1": 12345678.125}, step)
            log.save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert caplog.text.count("cannot be written (File too large); rows are lost") == 2
    assert train(log, 1, start=3)[:3] == rows == read_rows(path)[:3]


def test_a_kill_leaves_a_readable_file(tmp_path):
    path = tmp_path / "metrics.csv"
    for round_number in range(4):
        path.write_text("step,train/loss,val/top1\n")
        child = os.fork()
        if child == 0:
            log = CsvLog(path)
            log.resume_at(0)
            train(log, 10**9)
        while path.stat().st_size < 500 + 9 * round_number:
            assert os.waitpid(child, os.WNOHANG) == (0, 0)
            time.sleep(0.001)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        rows = read_rows(path)
        complete = [
            {"step": n, "train/loss": n + 0.25, "val/top1": n + 0.5} for n in range(len(rows))
        ]
        assert rows[:-1] == complete[:-1]
        assert rows == complete or rows[-1] == {k: complete[-1][k] for k in ("step", "train/loss")}
    assert len(rows) > 5
