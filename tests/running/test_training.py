"""Training in a run: exact resume, signals, best and last checkpoints, logs."""

import contextlib
import copy
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback

from tasks.classification.task import ClassificationTask
from tasks.engine.callbacks.checkpoints import KeepLast
from tasks.engine.callbacks.loggers import read_rows
from tasks.engine.callbacks.monitors import StopEarly, TopCheckpoints
from tasks.engine.checkpoints.entries import EMA, UNREPORTED
from tasks.engine.loops.signals import STOP, RunStopped
from tasks.engine.optimisation.optimizer import SCHEDULE_FREE, build_optimizer
from tests.families import rest_slow, rest_slow_pairs
from tests.running.tiny import ADAMW, CONSTANT, Tiny, tiny_data, tiny_task
from tests.runs import same
from tools.runs import trainer as trainers
from tools.runs.resume import find_start

CHANNELS_LAST = torch.channels_last
# Options of the task; all others are the trainer's.
TASK = {"ema", "mixup", "model", "optimizer", "random_erasing", "schedule"}


class Layered(Tiny):
    """Model with a backbone's layers: the convolution, the norm, and the rest."""

    @property
    def backbone(self):
        return SimpleNamespace(
            no_weight_decay=frozenset(), num_layers=3, named_parameters=self.net.named_parameters,
            layer_id=lambda name: min(int(name.partition(".")[0]), 2),
        )  # fmt: skip


class Plain(Tiny):
    def __init__(self, classes=10):
        super().__init__(classes)
        self.net[1] = self.net[4] = torch.nn.Identity()


class Steps(Callback):
    def __init__(self):
        self.batches, self.found = [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batches.append({name: batch[name] for name in ("image", "label", "sample_id")})

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        model = copy.deepcopy(pl_module.model)
        joined = {name: torch.cat([b[name] for b in self.batches]) for name in self.batches[0]}
        gradients = [p.grad.clone() for p in pl_module.model.parameters()]
        self.found.append((model, joined, gradients))
        self.batches = []


class SignalAt(Callback):
    def __init__(self, *, step=None, validation=None, signum=signal.SIGTERM):
        self.step, self.validation, self.signum = step, validation, signum

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.fit_loop.epoch_loop.batch_progress.total.ready - 1 == self.step:
            os.kill(os.getpid(), self.signum)

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        if batch_idx == 0 and trainer.current_epoch == self.validation:
            os.kill(os.getpid(), self.signum)


@pytest.mark.parametrize("cores", [1, 2])
def test_processes_without_a_core_are_announced(
    cores, trainer_options, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    caplog.set_level("INFO")
    two = trainer_options | {"devices": 2, "strategy": "ddp"}
    trainers.make_trainer(two, tmp_path, "val/x", "max", training=True)
    said = "trainer.devices=2 starts more processes than there are cores (1)"
    assert caplog.text.count(said) == (cores == 1)


STOPS = [{"step": 8}, {"validation": 1}]
# Where a run is stopped, the trainer's options, and the batches that it has seen then.
RESUMED = [
    ({"step": 8}, {}, 9),
    ({"step": 8}, {"workers": 2}, 9),
    ({"step": 5}, {}, 6),  # the last step of an epoch
    ({"step": 6}, {"workers": 2}, 7),  # the first step of an epoch
    ({"validation": 1}, {}, 12),
    ({"validation": 1}, {"workers": 2}, 12),
    ({"step": 17}, {}, 18),  # the last step of all
    ({"step": 7}, {"val_check_interval": 0.5}, 8),
    ({"step": 6}, {"accumulate_grad_batches": 2}, 8),
    ({"step": 8}, {"check_val_every_n_epoch": 2}, 9),
    ({"step": 5}, {"limit_train_batches": 4}, 6),
    ({"step": 7}, {"max_steps": 14}, 8),
]


@pytest.mark.usefixtures("one_thread")
class TestTraining:
    """Runs of 3 epochs of 6 batches of a tiny model with dropout, mixup and batch norm."""

    @pytest.fixture
    def train(self, sample_cache, trainer_options, tmp_path):
        def train(folder, resume=False, workers=0, extra=(), overfit=False, **options):
            folder = tmp_path / folder
            folder.mkdir(exist_ok=True)
            data = tiny_data(sample_cache, num_workers=workers)
            data.fixed_order = overfit
            usual = {"schedule": {"name": "cosine", "warmup": 0.5}, "mixup": {"mixup_alpha": 0.8}}
            own = {name: options.pop(name) for name in TASK & options.keys()}
            task = tiny_task(**usual | own)
            options = {**trainer_options, "max_epochs": 3, "limit_val_batches": 2, **options}
            trainer = trainers.make_trainer(options, folder, task.monitor, task.mode, training=True)
            trainer.callbacks[:0] = extra
            with contextlib.suppress(RunStopped), STOP.listening():
                start = find_start(folder, None, task, options) if resume else None
                trainers.fit(trainer, task, data, start=start)
            self.task = task
            return task.model.seen, folder

        return train

    def test_channels_last_memory_keeps_all_numbers(self, train):
        formats = []

        class Look(Callback):
            def on_train_batch_end(self, trainer, pl_module, *_):
                convolution = pl_module.model.net[0]
                formats.append(convolution.weight.is_contiguous(memory_format=CHANNELS_LAST))
                formats.append(convolution.weight.is_contiguous())

        _, usual = train("usual", extra=[Look()], precision="64-true")
        _, last = train("last", extra=[Look()], precision="64-true", channels_last=True)
        assert formats == [False, True] * 18 + [True, False] * 18
        torch.testing.assert_close(
            self.weights(last, "last"), self.weights(usual, "last"), rtol=1e-9, atol=1e-9
        )

    def test_the_log_on_disk_covers_the_steps_of_a_checkpoint(self, train, monkeypatch):
        """A kill right after it loses no row, since finished steps are not repeated."""
        logged = []

        class Look(Callback):
            def on_save_checkpoint(self, trainer, pl_module, checkpoint):
                rows = read_rows(Path(trainer.default_root_dir) / "metrics.csv")
                logged.append((trainer.global_step, [row["step"] for row in rows]))

        monkeypatch.setattr(KeepLast, "_is_save_due", lambda self: True)
        train("looked", extra=[Look()])
        assert {step for step, _ in logged} == set(range(1, 19))
        assert all(steps == list(range(step)) for step, steps in logged)

    def weights(self, folder, name, container="state_dict"):
        path = folder / "checkpoints" / f"{name}.ckpt"
        return torch.load(path, weights_only=True)[container]

    def assert_same(self, folders, *containers, names=("last", "best")):
        """Compare parts of the checkpoints of two runs."""
        for name in names:
            for container in containers:
                expected, got = (self.weights(folder, name, container) for folder in folders)
                assert same(expected, got), (name, container)

    @pytest.mark.parametrize(
        ("stop", "options", "seen_before"),
        rest_slow_pairs(RESUMED, [RESUMED[i] for i in (0, 2, 7)]),
        ids=str,
    )
    def test_a_resumed_run_equals_an_unbroken_one(self, train, stop, options, seen_before):
        seen, whole = train("whole", **options)
        first, broken = train("broken", extra=[SignalAt(**stop)], **options)
        assert len(first) == seen_before
        second, _ = train("broken", resume=True, **options)
        assert first + second == seen
        self.assert_same((whole, broken), "state_dict")

    @pytest.mark.parametrize("stop", rest_slow(STOPS, STOPS[:1]), ids=str)
    def test_an_average_resumes_exactly(self, train, stop):
        _, whole = train("whole", ema={"decay": 0.9})
        train("broken", ema={"decay": 0.9}, extra=[SignalAt(**stop)])
        _, broken = train("broken", ema={"decay": 0.9}, resume=True)
        self.assert_same((whole, broken), "state_dict", EMA)

    @pytest.mark.parametrize("name", rest_slow(list(SCHEDULE_FREE), list(SCHEDULE_FREE)[:1]))
    def test_a_schedule_free_average_resumes_exactly(self, train, name):
        """Validations leave the trained weights unchanged; loaders find the average."""
        pytest.importorskip("schedulefree")
        given = {"optimizer": {"name": name, "lr": 1e-2}, "schedule": CONSTANT}
        _, whole = train("whole", **given)
        train("broken", extra=[SignalAt(step=8)], **given)
        _, broken = train("broken", resume=True, **given)
        _, rarely = train("rarely", check_val_every_n_epoch=3, **given)
        self.assert_same((whole, rarely), "state_dict", names=["last"])
        self.assert_same((whole, broken), "state_dict", EMA)
        last, average = (self.weights(whole, "last", part) for part in ("state_dict", EMA))
        task = tiny_task(**given)
        optimizer = build_optimizer(task.model, task._rules, **task.optimizer_options)
        weights = {key: value for key, value in last.items() if key.startswith("model.")}
        task.load_state_dict(weights, strict=False)
        optimizer.load_state_dict(self.weights(whole, "last", "optimizer_states")[0])
        optimizer.eval()
        assert not same(last, average)
        loaded = tiny_task()
        loaded.load_weights(whole / "checkpoints" / "last.ckpt")
        for found in (task, loaded):
            assert same({f"model.{k}": v for k, v in found.model.state_dict().items()}, average)

    @pytest.mark.parametrize("stop", rest_slow(STOPS, STOPS[1:]), ids=str)
    def test_rates_by_layer_and_random_numbers_resume_exactly(self, train, stop):
        """LAMB, layer-wise rates, groups by name, erasing, and the better of weights and average.

        The optimiser's groups, its state and the reported weights equal those of an unbroken run.
        """
        optimizer = {
            "name": "lamb", "lr": 1e-2, "weight_decay": 0.05, "layer_decay": 0.5,
            "groups": [{"match": "net.5.*", "lr_scale": 10}],
        }  # fmt: skip
        schedule = {"name": "cosine", "by_epoch": True, "lag": 1}
        given = {"optimizer": optimizer, "schedule": schedule, "random_erasing": 0.5}
        given |= {"ema": {"decay": 0.9, "report": "best"}, "model": Layered}
        _, whole = train("whole", **given)
        train("broken", extra=[SignalAt(**stop)], **given)
        _, broken = train("broken", resume=True, **given)
        for name in ("best", "last"):
            files = [folder / "checkpoints" / f"{name}.ckpt" for folder in (whole, broken)]
            expected, got = (torch.load(file, weights_only=True) for file in files)
            assert expected.keys() == got.keys()
            for container in {"state_dict", EMA, UNREPORTED} & expected.keys():
                assert same(expected[container], got[container]), container
        states = [content["optimizer_states"][0] for content in (expected, got)]
        assert states[0]["param_groups"] == states[1]["param_groups"]
        scales = {group["lr_scale"] for group in states[0]["param_groups"]}
        assert scales == {0.25, 0.5, 10.0}
        torch.testing.assert_close(states[0]["state"], states[1]["state"], rtol=0, atol=0)

    @pytest.mark.parametrize(
        ("decay", "place"),
        [pytest.param(0.0, EMA, marks=pytest.mark.slow), (0.999999, UNREPORTED)],
        ids=["average", "weights"],
    )
    def test_the_better_of_weights_and_average_is_reported_and_loaded(self, train, decay, place):
        """An average equal to the weights wins; one still at the initial weights loses."""
        ema = {"decay": decay, "report": "best"}
        adamw = {"name": "adamw", "lr": 3e-2}
        _, folder = train("run", ema=ema, optimizer=adamw, mixup=None, max_epochs=8)
        rows = [row for row in read_rows(folder / "metrics.csv") if "val/top1" in row]
        both = [[row[f"val/top1_{name}"] for name in ("weights", "ema")] for row in rows]
        assert [row["val/top1"] for row in rows] == [max(pair) for pair in both]
        if place == UNREPORTED:
            assert max(weights for weights, _ in both) > max(average for _, average in both)
        path = folder / "checkpoints" / "best.ckpt"
        content = torch.load(path, weights_only=True)
        assert {EMA, UNREPORTED} & content.keys() == {place}
        reported = content[place if place == EMA else "state_dict"]
        fresh = tiny_task()
        fresh.load_weights(path)
        # The loaded weights, and those that the run tested and draws with.
        for model in (fresh, self.task):
            state = model.state_dict()
            assert all(torch.equal(state[key], value) for key, value in reported.items())

    def test_the_average_is_evaluated_and_loaded_and_leaves_training_unchanged(self, train):
        _, plain = train("plain", accumulate_grad_batches=2)
        _, folder = train("average", ema={"decay": 0.9}, accumulate_grad_batches=2)
        live, average = (self.weights(folder, "last", part) for part in ("state_dict", EMA))
        assert same(live, self.weights(plain, "last"))
        assert not all(value.equal(average[key]) for key, value in live.items())
        assert self.weights(folder, "last", "ema_steps") == 9  # 18 batches
        # The run tests and draws with the best average.
        best = self.weights(folder, "best", EMA)
        fresh = tiny_task()
        fresh.load_weights(folder / "checkpoints" / "best.ckpt")
        for state in (self.task.state_dict(), fresh.state_dict()):
            assert all(value.equal(state[key]) for key, value in best.items())

    @pytest.mark.parametrize(
        ("options", "sizes"),
        [
            ({"accumulate_grad_batches": 4}, [4, 2, 4, 2]),
            ({"accumulate_grad_batches": 4, "limit_train_batches": 5}, [4, 1, 4, 1]),
            ({"accumulate_grad_batches": 9}, [6, 6]),
            ({"accumulate_grad_batches": 5, "max_epochs": -1, "max_steps": 3}, [5, 1, 5]),
            ({"accumulate_grad_batches": 1, "max_steps": 2}, [1, 1]),
        ],
    )
    def test_a_step_is_the_mean_of_its_batches(self, train, options, sizes):
        steps = Steps()
        options = {"max_epochs": 2, **options}
        _, folder = train("run", extra=[steps], mixup=None, model=Plain, **options)
        assert [len(images["label"]) for _, images, _ in steps.found] == [6 * n for n in sizes]
        for model, images, gradients in steps.found:
            model.zero_grad()
            model.loss(images)["loss_cls"].backward()
            expected = [parameter.grad for parameter in model.parameters()]
            torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-6)
        rows = [row for row in read_rows(folder / "metrics.csv") if "train/loss" in row]
        losses = [model.loss(images)["loss_cls"].item() for model, images, _ in steps.found]
        assert [row["train/loss"] for row in rows] == pytest.approx(losses, rel=1e-5)
        assert [row["train/loss_cls"] for row in rows] == pytest.approx(losses, rel=1e-5)

    @pytest.mark.parametrize(
        ("accumulate", "rate"),
        [(1, 0.01 * 6 / 24), (2, 0.01 * 12 / 24), (9, 0.01 * 36 / 24)],  # an epoch has 6 batches
    )
    def test_the_rate_is_for_all_images_of_a_step(self, train, monkeypatch, accumulate, rate):
        monkeypatch.setitem(ADAMW, "reference_batch", 24)
        train("scaled", accumulate_grad_batches=accumulate, max_epochs=1)
        scheduler = self.task.trainer.lr_scheduler_configs[0].scheduler
        assert scheduler.base_lrs == [rate, rate]

    def test_the_last_checkpoint_is_the_last_epochs_even_if_it_was_worse(self, train, monkeypatch):
        scores = iter((3.0, 2.0, 1.0, 0.0))
        figures = lambda _: {"top1": torch.tensor(next(scores))}  # noqa: E731
        monkeypatch.setattr(ClassificationTask, "compute_metrics", figures)
        _, folder = train("run")
        assert [self.weights(folder, n, "global_step") for n in ("last", "best")] == [18, 6]

    @pytest.mark.parametrize("figure", [{}, {"top1": torch.tensor(torch.nan)}])
    def test_a_metric_that_cannot_be_computed_warns(self, train, monkeypatch, figure):
        """The best checkpoint is the last epoch's if that has the metric, else the latest."""
        steps, figures = [], iter((figure, figure, {"top1": torch.tensor(0.0)}, {}))

        class Look(Callback):
            def on_validation_end(self, trainer, pl_module):
                if (best := Path(trainer.default_root_dir) / "checkpoints" / "best.ckpt").exists():
                    steps.append(torch.load(best, weights_only=True)["global_step"])

        monkeypatch.setattr(ClassificationTask, "compute_metrics", lambda _: next(figures))
        watching = [
            StopEarly("val/top1", 1, "max", 0.0),
            TopCheckpoints(Path("run"), "val/top1", "max", 1),
        ]
        monkeypatch.setattr(TopCheckpoints, "_save_checkpoint", lambda _, trainer, path: (
            tops.append(trainer.global_step)))  # fmt: skip
        tops = []
        with pytest.warns(UserWarning, match="val/top1 cannot be computed"):
            _, folder = train("run", extra=[*watching, Look()])
        assert self.weights(folder, "best", "global_step") == 18
        assert steps == [6, 12]
        assert tops == [18]
        states = self.weights(folder, "last", "callbacks")
        assert any(key.startswith("ModelCheckpoint{'monitor': 'val/top1'") for key in states)

    def test_nonfinite_weights_stop_the_run(self, train):
        class Spoil(Callback):
            def on_validation_end(self, trainer, pl_module):
                if trainer.current_epoch == 1:
                    pl_module.model.net[0].bias.data[0] = torch.nan

        with pytest.raises(ValueError, match=r"model\.net\.0\.bias contains NaN or Inf"):
            train("run", extra=[Spoil()])
