"""Images per second, the remaining time, and other figures of a summary."""

from types import SimpleNamespace

import pytest
import torch

from datamodules import SampleClassification
from tasks.classification.family import FAMILY
from tasks.engine.callbacks import pace
from tasks.engine.callbacks.progress import ProgressLines
from tasks.engine.run_folder.run_config import RunConfig
from tests.runs import RECIPE
from tools.runs import report
from tools.runs import run_facts as run_facts

TASK = SimpleNamespace(family=FAMILY)


@pytest.fixture
def clock(monkeypatch):
    """Replace the clock by one that only the test advances."""
    now = [0.0]
    monkeypatch.setattr(pace.time, "perf_counter", lambda: now[0])
    return now


def train(measured, clock, seconds, *, steps=100.0, world_size=1, validation=0.0, device="cpu"):
    """Run batches of 8 images with these seconds each, then validation."""
    trainer = SimpleNamespace(
        global_step=0, estimated_stepping_batches=steps, world_size=world_size, max_steps=-1,
        strategy=SimpleNamespace(root_device=torch.device(device)),
    )  # fmt: skip
    measured.on_train_start(trainer, TASK)
    measured.on_train_epoch_start(trainer, None)
    for index, duration in enumerate(seconds):
        clock[0] += duration / 4
        measured.on_train_batch_start(trainer, None, None, index)
        clock[0] += duration * 3 / 4
        trainer.global_step += 1
        measured.on_train_batch_end(trainer, None, None, {"image": torch.zeros(8)}, index)
    clock[0] += validation
    measured.on_validation_end(trainer, None)
    return trainer


def test_the_rate_and_waiting_exclude_start_up_and_validation(clock):
    measured = pace.Pace()
    assert (measured.samples_per_second, measured.waiting_share, str(measured)) == (None, None, "")
    train(measured, clock, [50.0, 2.0, 2.0], validation=100.0)
    assert (measured.samples_per_second, measured.waiting_share) == (4.0, 0.25)
    measured = pace.Pace()
    train(measured, clock, [50.0, 2.0, 2.0], world_size=4)
    assert measured.samples_per_second == 16.0


@pytest.mark.parametrize(
    ("share", "workers", "resident", "text"),
    [(0.0, 0, None, "0%"), (0.1, 4, False, "10%"), (0.5, 4, True, "50%"),
     (0.314, 0, None, "31%; data.num_workers=2 may be faster (it was 0)"),
     (0.5, 4, False, "50%; data.num_workers=8 may be faster (it was 4), or data.resident=true")],
)  # fmt: skip
def test_much_waiting_names_the_setting_to_change(share, workers, resident, text):
    assert report.describe_waiting(share, workers, resident) == text.replace("%", "% of training")


def test_the_remaining_time_includes_validations(clock):
    measured = pace.Pace()
    trainer = train(measured, clock, [4.0, 2.0], steps=10, validation=4.0)
    assert measured.seconds_left == 8 * 3.0
    trainer.global_step += 1
    measured.on_train_batch_end(trainer, None, None, {"image": torch.zeros(8)}, 2)
    assert measured.seconds_left == pytest.approx(7 * 10 / 3)
    assert str(measured) == "8 images/s, 23 s left"
    train(measured, clock, [1.0], steps=1)
    assert measured.seconds_left == 0
    assert "left" not in str(measured)
    endless = pace.Pace()
    train(endless, clock, [1.0], steps=float("inf"))
    assert endless.seconds_left is None


@pytest.mark.parametrize(
    ("max_epochs", "max_steps", "accumulated", "ends"),
    [(4, -1, 1, [5, 5, 5, 5]), (4, 20, 1, [5, 5, 5, 5]), (4, 3, 1, [3]), (4, 7, 1, [5, 2]),
     (-1, 6, 1, [5, 1]), (4, 4, 2, [5, 2]), (4, 6, 2, [5, 5])],
)  # fmt: skip
def test_progress_ends_with_the_training(max_epochs, max_steps, accumulated, ends, caplog, clock):
    caplog.set_level("INFO")
    bar, lines = pace.PaceBar(pace.Pace()), ProgressLines(every=0.0)
    trainer = SimpleNamespace(
        max_epochs=max_epochs, max_steps=max_steps, accumulate_grad_batches=accumulated,
        num_training_batches=5, progress_bar_metrics={},
    )  # fmt: skip
    bar._trainer = trainer
    for epoch, end in enumerate(ends):
        trainer.current_epoch = epoch
        lines.on_train_batch_end(trainer, None, None, None, 0)
        lines.on_train_epoch_end(trainer, None)
        assert f"  step 1/{end}  " in caplog.text
        assert f"epoch {epoch + 1}/{len(ends)}  " in caplog.text
        assert bar.total_train_batches == end
        assert bar.describe_epoch(epoch).strip() == f"Epoch {epoch}/{len(ends) - 1}"
        caplog.clear()


@pytest.mark.parametrize(
    ("options", "text"),
    [({}, "3 epochs"), ({"max_epochs": 1}, "1 epoch"), ({"max_steps": 8}, "8 steps"),
     ({"max_steps": 15}, "3 epochs"), ({"max_epochs": -1, "max_steps": 1}, "1 step"),
     ({"max_steps": 8, "accumulate_grad_batches": 2}, "8 steps"),
     ({"max_steps": 9, "accumulate_grad_batches": 2}, "3 epochs"),
     ({"max_steps": 8, "limit_train_batches": 2}, "3 epochs"), ({"max_epochs": -1}, "without end")],
)  # fmt: skip
def test_the_length_of_a_run_is_logged(options, text):
    usual = {"max_epochs": 3, "max_steps": -1, "accumulate_grad_batches": 1}
    assert report._describe_length({"limit_train_batches": 1.0, **usual, **options}, 5) == text
    durations = {0.4: "0 s", 59.6: "1 min 0 s", 200: "3 min 20 s", 3600: "1 h 0 min",
                 7500: "2 h 5 min"}  # fmt: skip
    assert {seconds: pace.duration(seconds) for seconds in durations} == durations


def test_a_summary_has_the_rate_that_was_used(tmp_path):
    """Scaled linearly to the images per step, over all processes and accumulated batches."""
    data = SampleClassification(tmp_path, batch_size=8, digits_per_class=4)
    data.prepare_data()
    data.setup()
    trainer = SimpleNamespace(
        precision="32-true", world_size=2, accumulate_grad_batches=3, num_training_batches=9,
        callbacks=[pace.Pace()],
        strategy=SimpleNamespace(root_device=torch.device("cpu")), default_root_dir=tmp_path,
    )  # fmt: skip
    config = RunConfig(
        task_name="", backbone={}, head={}, task={}, data={"_target_": "x"}, overrides=["a=1"],
        optimizer={**RECIPE["optimizer"], "lr": 1e-3, "reference_batch": 1024},
    )  # fmt: skip
    facts = run_facts.collect_facts(config, trainer, data)
    assert facts["global_batch"] == 48
    assert facts["learning_rate"] == pytest.approx(1e-3 * 48 / 1024)
    assert facts["checkpoint_step"] is None
    config.optimizer["reference_batch"] = None
    assert run_facts.collect_facts(config, trainer, data)["learning_rate"] == 1e-3
    assert "left_out" not in facts["data"]
    data.left_out = "3 of 9 validation boxes (an option)"
    facts = run_facts.collect_facts(config, trainer, data) | {"metrics": {"AP": 0.5}}
    assert facts["data"]["left_out"] == data.left_out
    assert report.describe_left_out(facts) == {"left out of evaluation": data.left_out}
    assert report.describe_left_out(facts | {"metrics": {}}) == {}
