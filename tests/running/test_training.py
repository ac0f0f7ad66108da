"""Training in a run: exact resume, signals, best and last checkpoints, logs."""

import contextlib
import copy
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as lightning
import pytest
import torch
from lightning.pytorch import Callback

from datamodules import SampleClassification
from tasks.classification.task import ClassificationTask
from tasks.engine import callbacks
from tasks.engine.checkpoint_callbacks import KeepLast
from tasks.engine.checkpoint_entries import EMA, UNREPORTED
from tasks.engine.gather import gather_objects
from tasks.engine.loggers import CsvLog, TensorBoardLog, read_rows
from tasks.engine.monitors import StopEarly, TopCheckpoints
from tasks.engine.optim import SCHEDULE_FREE, build_optimizer
from tasks.engine.signals import STOP, RunStopped
from tests.families import rest_slow
from tests.running.tiny import ADAMW, CONSTANT, Tiny, tiny_task
from tests.runs import same
from tools.config.lazy_groups import register_groups
from tools.config.run_config import compose_config
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
    """Without batch norm and dropout, so that a step's images could be one batch."""

    def __init__(self, classes=10):
        super().__init__(classes)
        self.net[1] = self.net[4] = torch.nn.Identity()


class Steps(Callback):
    """Records batches, weights and gradients of each optimiser step."""

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
    """Sends a signal to this process at a step, or in an epoch's validation."""

    def __init__(self, *, step=None, validation=None, signum=signal.SIGTERM):
        self.step, self.validation, self.signum = step, validation, signum

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.fit_loop.epoch_loop.batch_progress.total.ready - 1 == self.step:
            os.kill(os.getpid(), self.signum)

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        if batch_idx == 0 and trainer.current_epoch == self.validation:
            os.kill(os.getpid(), self.signum)


@pytest.fixture(scope="module")
def default_trainer():
    register_groups()
    return dict(compose_config(["trainer=cpu"]).trainer) | {"log_every_n_steps": 1}


@pytest.mark.parametrize("cores", [1, 2])
def test_processes_without_a_core_are_announced(
    cores, default_trainer, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    with caplog.at_level("INFO"):
        trainers.make_trainer(
            default_trainer | {"devices": 2, "strategy": "ddp"},
            tmp_path,
            "val/x",
            "max",
            training=True,
        )
    said = "trainer.devices=2 starts more processes than there are cores (1)"
    assert caplog.text.count(said) == (cores == 1)


STOPS = [{"step": 8}, {"validation": 1}]


@pytest.mark.usefixtures("one_thread")
class TestTraining:
    """Runs of 3 epochs of 6 batches of a tiny model with dropout, mixup and batch norm."""

    @pytest.fixture
    def train(self, sample_cache, default_trainer, tmp_path):
        def train(folder, resume=False, workers=0, extra=(), overfit=False, **options):
            folder = tmp_path / folder
            folder.mkdir(exist_ok=True)
            lightning.seed_everything(0, verbose=False)
            data = SampleClassification(
                sample_cache, digits_per_class=4, train_copies=1, picture_size=32, batch_size=6,
                num_workers=workers,
            )  # fmt: skip
            data.fixed_order = overfit
            data.setup()
            usual = {"schedule": {"name": "cosine", "warmup": 0.5}, "mixup": {"mixup_alpha": 0.8}}
            own = {name: options.pop(name) for name in TASK & options.keys()}
            task = tiny_task(**usual | own)
            options = {**default_trainer, "max_epochs": 3, "limit_val_batches": 2, **options}
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

    @pytest.mark.parametrize(
        ("stop", "options", "seen_before"),
        [
            pytest.param({"step": 8}, {}, 9, id="mid epoch"),
            pytest.param(
                {"step": 8}, {"workers": 2}, 9, id="mid epoch, workers", marks=pytest.mark.slow
            ),
            pytest.param({"step": 5}, {}, 6, id="last step of an epoch"),
            pytest.param(
                {"step": 6},
                {"workers": 2},
                7,
                id="first step of an epoch, workers",
                marks=pytest.mark.slow,
            ),
            pytest.param({"validation": 1}, {}, 12, id="validation", marks=pytest.mark.slow),
            pytest.param(
                {"validation": 1},
                {"workers": 2},
                12,
                id="validation, workers",
                marks=pytest.mark.slow,
            ),
            pytest.param({"step": 17}, {}, 18, id="last step of all", marks=pytest.mark.slow),
            pytest.param({"step": 7}, {"val_check_interval": 0.5}, 8, id="validation by steps"),
            pytest.param(
                {"step": 6},
                {"accumulate_grad_batches": 2},
                8,
                id="accumulation",
                marks=pytest.mark.slow,
            ),
            pytest.param(
                {"step": 8},
                {"check_val_every_n_epoch": 2},
                9,
                id="rare validation",
                marks=pytest.mark.slow,
            ),
            pytest.param(
                {"step": 5},
                {"limit_train_batches": 4},
                6,
                id="part of the data",
                marks=pytest.mark.slow,
            ),
            pytest.param(
                {"step": 7}, {"max_steps": 14}, 8, id="an end by steps", marks=pytest.mark.slow
            ),
        ],
    )
    def test_a_resumed_run_equals_an_unbroken_one(self, train, stop, options, seen_before):
        seen, whole = train("whole", **options)
        first, broken = train("broken", extra=[SignalAt(**stop)], **options)
        assert len(first) == seen_before
        second, _ = train("broken", resume=True, **options)
        assert first + second == seen
        for name in ("last", "best"):
            expected, got = self.weights(whole, name), self.weights(broken, name)
            assert all(value.equal(got[key]) for key, value in expected.items()), name

    @pytest.mark.parametrize("stop", rest_slow(STOPS, STOPS[:1]), ids=str)
    def test_an_average_resumes_exactly(self, train, stop):
        _, whole = train("whole", ema={"decay": 0.9})
        train("broken", ema={"decay": 0.9}, extra=[SignalAt(**stop)])
        _, broken = train("broken", ema={"decay": 0.9}, resume=True)
        for name in ("last", "best"):
            for container in ("state_dict", "state_dict_ema"):
                expected, got = (self.weights(f, name, container) for f in (whole, broken))
                assert expected.keys() == got.keys()
                assert all(value.equal(got[key]) for key, value in expected.items()), container

    @pytest.mark.parametrize("name", rest_slow(list(SCHEDULE_FREE), list(SCHEDULE_FREE)[:1]))
    def test_a_schedule_free_average_resumes_exactly(self, train, name):
        """Validations leave the trained weights unchanged; loaders find the average."""
        pytest.importorskip("schedulefree")
        given = {"optimizer": {"name": name, "lr": 1e-2}, "schedule": CONSTANT}
        _, whole = train("whole", **given)
        train("broken", extra=[SignalAt(step=8)], **given)
        _, broken = train("broken", resume=True, **given)
        _, rarely = train("rarely", check_val_every_n_epoch=3, **given)
        last = self.weights(whole, "last")
        assert same(self.weights(rarely, "last"), last)
        for file in ("last", "best"):
            for container in ("state_dict", EMA):
                expected, got = (self.weights(f, file, container) for f in (whole, broken))
                assert same(expected, got), (file, container)
        task = tiny_task(**given)
        optimizer = build_optimizer(task.model, task._rules, **task.optimizer_options)
        task.load_state_dict(
            {k: v for k, v in last.items() if k.startswith("model.")}, strict=False
        )
        optimizer.load_state_dict(self.weights(whole, "last", "optimizer_states")[0])
        optimizer.eval()
        average = self.weights(whole, "last", EMA)
        assert same({f"model.{k}": v for k, v in task.model.state_dict().items()}, average)
        assert not same(last, average)
        loaded = tiny_task()
        loaded.load_weights(whole / "checkpoints" / "last.ckpt")
        assert same({f"model.{k}": v for k, v in loaded.model.state_dict().items()}, average)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"schedule": {"name": "cosine"}}, r"pass schedule\.name=constant"),
            ({"ema": {}}, r"its own average of the weights: pass task\.ema=null"),
        ],
    )
    def test_schedule_free_optimisers_refuse_another_average(self, options, message):
        pytest.importorskip("schedulefree")
        task = tiny_task(optimizer={"name": "schedulefree_sgd", "lr": 0.1}, **options)
        with pytest.raises(ValueError, match=message):
            task.check_training(None, 1)

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
        for name in ("last", "best"):
            expected, got = (
                torch.load(folder / "checkpoints" / f"{name}.ckpt", weights_only=True)
                for folder in (whole, broken)
            )
            assert expected.keys() == got.keys()
            for container in {"state_dict", EMA, UNREPORTED} & expected.keys():
                assert same(expected[container], got[container]), container
            if name == "best":
                continue  # holds weights only
            states = [content["optimizer_states"][0] for content in (expected, got)]
            assert states[0]["param_groups"] == states[1]["param_groups"]
            scales = {group["lr_scale"] for group in states[0]["param_groups"]}
            assert scales == {0.25, 0.5, 10.0}
            for key, values in states[0]["state"].items():
                assert all(torch.equal(value, states[1]["state"][key][k])
                           for k, value in values.items() if torch.is_tensor(value))  # fmt: skip

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

    def test_both_are_evaluated_by_their_own_predictions(self, train):
        """The average's figures equal those of a separate validation."""
        _, alone = train("alone", ema={"decay": 0.7})
        _, both = train("both", ema={"decay": 0.7, "report": "best"})
        _, plain = train("plain")
        figures = [
            [row[name] for row in read_rows(folder / "metrics.csv") if name in row]
            for folder, name in (
                (alone, "val/top1"), (both, "val/top1_ema"),
                (plain, "val/top1"), (both, "val/top1_weights"),
            )
        ]  # fmt: skip
        assert figures[0] == figures[1]
        assert figures[2] == figures[3]
        assert len(figures[0]) == 3

    def test_a_slow_average_is_logged(self, train, caplog):
        with caplog.at_level("INFO"):
            train("run", ema={"decay": 0.99996}, max_epochs=1)
        assert caplog.text.count("task.ema.decay=0.99996 is slow for 6 steps") == 1

    def test_the_average_is_evaluated_and_loaded_and_does_not_change_training(self, train):
        _, plain = train("plain", accumulate_grad_batches=2)
        expected = self.weights(plain, "last")
        _, folder = train("average", ema={"decay": 0.9}, accumulate_grad_batches=2)
        live, average = (self.weights(folder, "last", c) for c in ("state_dict", "state_dict_ema"))
        assert all(value.equal(expected[key]) for key, value in live.items())
        assert not all(value.equal(average[key]) for key, value in live.items())
        last = folder / "checkpoints" / "last.ckpt"
        assert torch.load(last, weights_only=True)["ema_steps"] == 9  # 18 batches
        # The run tests and draws with the best average.
        best = self.weights(folder, "best", "state_dict_ema")
        own = self.task.state_dict()
        assert all(value.equal(own[key]) for key, value in best.items())
        fresh = tiny_task()
        fresh.load_weights(folder / "checkpoints" / "best.ckpt")
        assert all(value.equal(fresh.state_dict()[key]) for key, value in best.items())

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
        train("run", extra=[steps], mixup=None, model=Plain, **{"max_epochs": 2, **options})
        assert [len(images["label"]) for _, images, _ in steps.found] == [6 * n for n in sizes]
        for model, images, gradients in steps.found:
            model.zero_grad()
            model.loss(images)["loss_cls"].backward()
            expected = [parameter.grad for parameter in model.parameters()]
            torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-6)

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
        monkeypatch.setattr(
            ClassificationTask, "compute_metrics", lambda _: {"top1": torch.tensor(next(scores))}
        )
        _, folder = train("run")
        steps = {
            name: torch.load(folder / "checkpoints" / f"{name}.ckpt", weights_only=True)
            for name in ("last", "best")
        }
        assert (steps["last"]["global_step"], steps["best"]["global_step"]) == (18, 6)

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

    def test_each_epoch_of_overfitting_has_the_same_batches(self, train):
        first, _ = train("first", overfit=True, max_epochs=2)
        assert first[:6] == first[6:]
        again, _ = train("usual", max_epochs=2)
        assert again[:6] == first[:6] != again[6:]

    def test_nonfinite_weights_are_not_saved(self, train):
        class Spoil(Callback):
            def on_validation_end(self, trainer, pl_module):
                if trainer.current_epoch == 1:
                    pl_module.model.net[0].bias.data[0] = torch.nan

        with pytest.raises(ValueError, match=r"model\.net\.0\.bias contains NaN or Inf"):
            train("run", extra=[Spoil()])

    def test_progress_lines_show_loss_and_main_metrics(self, train, caplog, monkeypatch):
        monkeypatch.setattr(callbacks.ProgressLines.__init__, "__defaults__", (0.0,))
        with caplog.at_level("INFO"):
            train("run", max_epochs=1)
        lines = [
            record.message for record in caplog.records if record.name == "tasks.engine.callbacks"
        ]
        assert lines[0].startswith("  step 1/6  train/loss ")
        assert len(lines) == 7
        assert "epoch 1/1  train/loss" in lines[-1]
        assert "val/top1" in lines[-1]

    @pytest.mark.parametrize("signum", [signal.SIGHUP, signal.SIGUSR1], ids=str)
    def test_other_signals_save_and_stop_too(self, train, signum):
        before = signal.signal(signum, signal.SIG_DFL)  # nohup makes a process ignore the first one
        try:
            first, folder = train("run", extra=[SignalAt(step=2, signum=signum)])
        finally:
            signal.signal(signum, before)
        assert len(first) == 3
        assert self.weights(folder, "last", "global_step") == 3
        assert not (folder / "checkpoints" / "best.ckpt").exists()


class TestLogs:
    def test_a_full_disk_does_not_end_the_run(self, tmp_path, monkeypatch, caplog):
        log = CsvLog(tmp_path / "a.csv")
        log.log_metrics({"loss": 1}, step=0)
        monkeypatch.setattr(
            "pathlib.Path.open", lambda *_, **__: (_ for _ in ()).throw(OSError(28))
        )
        log.save()
        assert "a.csv cannot be written" in caplog.text
        monkeypatch.undo()
        log.log_metrics({"loss": 2}, step=1)
        log.save()
        assert read_rows(tmp_path / "a.csv") == [{"step": 1, "loss": 2}]

    def test_tensorboard_leaves_one_file(self, tmp_path):
        log = TensorBoardLog(tmp_path / "tb")
        log.log_hyperparams({"a": 1})
        assert not (tmp_path / "tb").exists()
        for step in range(3):
            log.log_metrics({"loss": 1.0, "epoch": 0}, step=step)
        log.finalize("success")
        log.log_metrics({"test": 1.0}, step=3)
        log.finalize("success")
        (file,) = (tmp_path / "tb").iterdir()
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(file)).Reload()
        assert set(events.Tags()["scalars"]) == {"loss", "test"}


def test_gathering_in_one_process_is_a_list_of_one():
    assert gather_objects({"a": 1}) == [{"a": 1}]
