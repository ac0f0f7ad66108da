"""Callbacks, loggers and profilers of a config."""

import errno
import logging
import os
import re
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import yaml
from lightning.pytorch import Callback

from tasks.engine.callbacks.loggers import LEAST_SPACE, TensorBoardLog, read_rows
from tasks.engine.callbacks.monitors import GradientNorm
from tasks.engine.callbacks.optional import make_callbacks, make_profiler
from tasks.engine.callbacks.profiling import Unprofiled
from tests.runs import (
    arguments,
    command,
    composed,
    refused,
    start,
    wait_for,
    write_run,
)  # fmt: skip
from tools.config.config_checks import resolve_config
from tools.config.option_checks import check_callbacks
from tools.config.run_config import job_config
from tools.runs import components
from tools.runs import logger_setup as loggers
from tools.runs.folder import check_same_config

METRICS = {"top1": "max", "top5": "max", "loss": "min"}
NO_STOP = {"early_stopping": {"patience": None}}


def test_a_plain_run_has_none_and_its_profiler_passes_errors_on(tmp_path):
    assert make_callbacks(tmp_path, "val/top1", METRICS, **NO_STOP) == []
    assert make_profiler(None, tmp_path) == (None, [])
    profiler = Unprofiled()
    outer, inner = profiler.profile("step"), profiler.profile("backward")  # Lightning nests them
    assert outer is inner
    with pytest.raises(KeyError), outer, inner:
        raise KeyError
    assert profiler.summary() == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [({"top_k": -1}, r"callbacks\.top_k=-1 is too low"),
     ({"early_stopping": {"metric": "top5"}}, r"top5 needs .*patience"),
     ({"early_stopping": {"patience": 0}}, "from 1 up"),
     ({"early_stopping": {"patience": 2, "metric": "top3"}}, "did you mean val/top"),
     ({"early_stopping": {"patience": 2, "metric": "zz"}}, "known: val/top1, val/top5"),
     ({"early_stopping": {"patients": 2}}, "did you mean patience"),
     ({"early_stopping": {"patience": 2, "mode": "up"}}, "one of max, min"),
     ({"monitor": "x"}, "no option of callbacks called 'monitor'.*callback of your own is"),
     ({"mine": {"_target_": "os.system"}}, r"callbacks\.mine\._target_=os\.system is not a Call"),
     ({"mine": {"_target_": "nowhere.Mine"}}, r"_target_=nowhere\.Mine: No module named"),
     ({"mine": {"_target_": f"{__name__}.Counting", "from": 1}}, "unexpected keyword .*'from'")],
)  # fmt: skip
def test_wrong_callbacks_are_one_sentence(options, message, tmp_path):
    def check_and_make(callbacks):
        check_callbacks(callbacks)
        make_callbacks(tmp_path, "val/top1", METRICS, **callbacks)

    with pytest.raises(ValueError, match=message):
        check_and_make({**NO_STOP, **options})


class Counting(Callback):
    """A callback of a user."""

    def __init__(self, start=0):
        self.count = start

    def on_train_batch_end(self, *_):
        self.count += 1


def test_a_callback_of_the_user_is_built_and_a_stored_one_is_not(tmp_path):
    mine = {"_target_": f"{__name__}.Counting", "start": 3}
    (made,) = make_callbacks(tmp_path, "val/top1", METRICS, **NO_STOP, mine=mine)
    assert (type(made), made.count) == (Counting, 3)
    words = [f"callbacks.mine._target_={__name__}.Counting", "callbacks.mine.start=3"]
    config = composed(*words)
    assert config.callbacks["mine"] == mine
    folder = write_run(tmp_path / "run", config)
    tested = resolve_config(job_config(["mode=test", f"ckpt={folder}"]))
    assert "mine" not in tested.callbacks
    with pytest.raises(ValueError, match=r"callbacks\.mine\._target_: .* then, None now"):
        check_same_config(folder, composed())


def test_wrong_profilers_and_loggers_are_one_sentence(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="did you mean simple"):
        make_profiler("simpel", tmp_path)
    for given, said in (
        ({"wandbb": {}}, "did you mean wandb"),
        ({"wandb": {"modus": "x"}}, "option of logger.wandb called 'modus'; did you mean mode"),
        ({"wandb": {}}, r"pip install .*mixerlab\[wandb\]"),
        ({"mlflow": {}}, r"pip install .*mixerlab\[mlflow\]"),
    ):
        if "pip" in said:
            monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(ValueError, match=said):
            loggers.make_loggers(given, tmp_path, {})


def test_the_norm_equals_that_of_all_gradients():
    model, logged = torch.nn.Linear(3, 2), []
    model(torch.ones(1, 3)).sum().backward()
    log = SimpleNamespace(log_metrics=lambda metrics, step: logged.append((metrics, step)))
    trainer = SimpleNamespace(global_step=4, strategy=None, loggers=[log])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    GradientNorm(1).on_before_optimizer_step(trainer, model, optimizer)
    # 6 weights and 2 biases, each with a gradient of 1
    assert logged == [({"train/gradient_norm": pytest.approx(8**0.5)}, 4)]


@pytest.mark.parametrize("name", loggers.MAKERS)
def test_a_read_only_store_is_refused_before_data_are_read(name, tmp_path, capsys, monkeypatch):
    refuse = mock.Mock(side_effect=OSError(errno.EROFS, os.strerror(errno.EROFS)))
    monkeypatch.setattr(loggers.os, "posix_fallocate", refuse)
    monkeypatch.setattr(loggers, "_require", lambda *_: None)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(components, "_datamodule", lambda *_: pytest.fail("data are read"))
    said = refused(arguments("classification", tmp_path, f"logger={name}"), tmp_path, capsys)
    assert re.match(
        rf"error: logger={name} cannot write .*{os.strerror(errno.EROFS)}.*logger=csv", said
    )


def test_a_full_disk_drops_a_log(tmp_path, caplog, monkeypatch):
    free = SimpleNamespace(free=LEAST_SPACE - 1)
    monkeypatch.setattr("tasks.engine.callbacks.loggers.shutil.disk_usage", lambda _: free)
    remote = loggers.RemoteLog("wandb", lambda: pytest.fail("it is full"), tmp_path)
    caplog.set_level(logging.INFO)
    for log in (remote, TensorBoardLog(tmp_path / "tensorboard")):
        caplog.clear()
        for step in range(3):
            log.log_metrics({"x": 1.0}, step)
        log.finalize("success")
        assert caplog.text.count("No space left on device") == 1
        assert "training continues" in caplog.text
    assert not list(tmp_path.iterdir())


def tensorboard_points(folder):
    """Return the values of each metric by step, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


def mlflow_points(folder):
    """Return them as MLflow's store has them, of a run that ended and has its first config."""
    from mlflow import MlflowClient

    store, name = (folder / "mlflow_run.txt").read_text().split()
    client = MlflowClient(store)
    run = client.get_run(name)
    assert len(client.search_runs([run.info.experiment_id])) == 1
    assert run.info.status == "FINISHED"
    assert (run.data.params["resume"], run.data.tags["resume"]) == ("False", "True")
    return {
        name: [
            (point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)
        ]
        for name in run.data.metrics
        if name != "epoch"
    }


def wandb_points(folder):
    """Return them as the files of an offline run have them, whose axis is the step."""
    from wandb.proto.wandb_internal_pb2 import Record

    points, runs = {}, sorted((folder / "wandb").glob("offline-run-*/*.wandb"))
    assert len(runs) == 2
    for file in runs:
        axes = {}
        for content in wandb_records(file.read_bytes()):
            record = Record.FromString(content)
            if record.HasField("run"):
                assert record.run.run_id == (folder / "wandb_run.txt").read_text().strip()
            if record.HasField("metric"):
                axes[record.metric.glob_name or record.metric.name] = record.metric.step_metric
            items = {
                (item.key or item.nested_key[0]): item.value_json for item in record.history.item
            }
            for name in items.keys() - {"epoch", "trainer/global_step"}:
                if not name.startswith("_"):
                    step = int(items["trainer/global_step"])
                    points.setdefault(name, []).append((step, float(items[name])))
        # The process of wandb writes every few seconds, so a kill leaves the first file cut off.
        is_cut = file == runs[0] and "*" not in axes
        assert is_cut or axes["*"] == "trainer/global_step"
    return points


def wandb_records(content):
    """Yield the records of a file of LevelDB's log format: blocks of 32 KiB, parts of a record."""
    place, whole = 7, b""  # after the file's header
    while place + 7 <= len(content):
        if 2**15 - place % 2**15 < 7:
            place += -place % 2**15
        size, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        whole += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield whole
            whole = b""


@pytest.mark.slow
def test_each_log_continues_after_a_kill(sample_cache, tmp_path, monkeypatch):
    """The stores of all loggers are read back after training, a kill, resuming and a test."""
    for package in ("wandb", "mlflow"):
        pytest.importorskip(package)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_SERVICE", raising=False)  # of other tests in this process
    typed = arguments("classification", tmp_path, "logger=[tensorboard,wandb,mlflow]",
                      "trainer.log_every_n_steps=1", backbone="resnet18", epochs=400)  # fmt: skip
    process = start(typed)
    rows = []

    def has_validated():
        nonlocal rows
        rows = [row for file in tmp_path.rglob("metrics.csv") for row in read_rows(file)]
        return len(rows) > 12

    wait_for(process, has_validated)
    process.kill()
    process.communicate()
    (folder,) = (path.parent for path in tmp_path.rglob("metrics.csv"))
    epochs = 3 + max(row["epoch"] for row in rows)
    more = ["resume=true", f"ckpt={folder}", f"trainer.max_epochs={epochs}"]
    for words in (
        [*typed, *more],
        ["mode=test", f"ckpt={folder}", f"output_dir={tmp_path / 'test'}"],
    ):
        ended = command(words)
        assert (ended.status, "stopped" in ended.out) == (0, False), ended
    expected = {}
    for row in read_rows(folder / "metrics.csv"):
        for name in row.keys() - {"step", "epoch"}:
            expected.setdefault(name, {})[row["step"]] = pytest.approx(row[name], rel=1e-6)
    assert len(expected["train/loss"]) == 5 * epochs
    for points in (tensorboard_points, mlflow_points, wandb_points):
        found = points(folder)
        assert found.keys() == expected.keys(), points
        for name, values in found.items():
            steps = expected[name].keys() - dict(values).keys() if points is wandb_points else set()
            assert all(step <= max(row["step"] for row in rows) for step in steps)  # of the kill
            kept = {step: value for step, value in expected[name].items() if step not in steps}
            assert dict(values) == kept, (points, name)


def test_logs_may_differ_on_resume_and_early_stopping_may_not(tmp_path):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(composed("backbone=deit_t").plain()))
    other = composed("backbone=deit_t", "logger=csv", "callbacks.top_k=3",
                     "callbacks.gradient_norm=1", "trainer.profiler=simple")  # fmt: skip
    check_same_config(tmp_path, other)
    stopping = composed("backbone=deit_t", "callbacks.early_stopping.patience=3")
    with pytest.raises(ValueError, match=r"callbacks\.early_stopping\.patience"):
        check_same_config(tmp_path, stopping)
