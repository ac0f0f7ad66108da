"""The lean step against Lightning's own: the same hooks, numbers, counters and logs."""

from itertools import product
from types import SimpleNamespace

import lightning.pytorch as lightning
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.strategies import DDPStrategy

from datamodules import SampleClassification
from tasks.classification import ClassificationTask
from tasks.lean_step import HOOKS, TRANSFER, LeanStep
from tasks.loggers import read_rows
from tests.families import rest_slow_pairs
from tests.running.tiny import ADAMW, CONSTANT, Tiny, tiny_task
from tools.command_line.lazy_groups import register
from tools.running.config import compose_config
from tools.running.trainer import make_trainer

TASK_ONLY = ("optimizer_zero_grad", "configure_gradient_clipping", "backward",
             "lr_scheduler_step", *TRANSFER)  # fmt: skip


def noted(value):
    """An argument of a hook, as far as two runs can be compared by it."""
    if isinstance(value, torch.Tensor):
        return value.detach().double().sum().item()
    if isinstance(value, dict):
        return {name: noted(one) for name, one in value.items()}
    return value if isinstance(value, int | float | str) else type(value).__name__


def listening(base, names, called, who):
    """A class with each of some hooks, which note that they were called, and how."""

    def hook(name):
        def listen(self, *arguments, **options):
            task = arguments[1] if who == "callback" else self
            sums = [None if p.grad is None else noted(p.grad) for p in task.parameters()]
            seen = [noted(value) for value in (*arguments, *options.values())]
            # A closure and a wrapped optimiser are each loop's own.
            called.append((who, name, task._current_fx_name, seen, sums, torch.is_grad_enabled()))
            if name in ("on_before_backward", "on_train_batch_end"):
                task.log(f"{who}/{name}", float(len(called)), on_step=True)
            return getattr(base, name)(self, *arguments, **options)

        return listen

    return type("Listening", (base,), {name: hook(name) for name in names})


@pytest.fixture
def train(sample_cache, tmp_path):
    """Two epochs of four batches, with validation."""
    register()

    def train(folder, task, callbacks=(), **options):
        lightning.seed_everything(0, verbose=False)
        data = SampleClassification(
            sample_cache, digits_per_class=4, train_copies=1, picture_size=32, batch_size=6,
            num_workers=0,
        )  # fmt: skip
        data.setup()
        (tmp_path / folder).mkdir()
        usual = dict(compose_config(["trainer=cpu"]).trainer) | {"log_every_n_steps": 2}
        trainer = make_trainer(
            {**usual, "max_epochs": 2, "limit_train_batches": 4, "limit_val_batches": 1, **options},
            tmp_path / folder, task.monitor, training=True, callbacks=callbacks,
        )  # fmt: skip
        trainer.fit(task, datamodule=data)
        return trainer

    return train


def seeded(kind):
    torch.manual_seed(1)
    return kind(Tiny(), [str(i) for i in range(10)], optimizer=ADAMW, schedule=CONSTANT)


OPTIONS = {
    "plain": {},
    "clipped": {"gradient_clip_val": 0.1},
    "mixed": {"precision": "bf16-mixed"},
}
OWN = {"none": (), "transfer": TRANSFER[1:2], "all": TASK_ONLY}


@pytest.mark.parametrize(
    ("options", "own"),
    rest_slow_pairs(list(product(OPTIONS, OWN)), list(zip(OPTIONS, OWN, strict=True))),
)
def test_it_is_lightnings_own(train, tmp_path, monkeypatch, options, own):
    options, own, taken, ended = OPTIONS[options], OWN[own], [], {}
    step = LeanStep.__call__
    monkeypatch.setattr(LeanStep, "__call__", lambda *given: (taken.append(1), step(*given))[1])
    for kind in ("lean", "own"):
        if kind == "own":
            monkeypatch.setattr(LeanStep, "serves", lambda trainer: False)
        called = []
        task = seeded(listening(ClassificationTask, (*HOOKS[1:], *own), called, "task"))
        callback = listening(Callback, HOOKS, called, "callback")()
        trainer = train(kind, task, [callback], **options)
        assert len(taken) == 8  # batches of the lean run, none of the other
        rows = read_rows(tmp_path / kind / "metrics.csv")
        for row in rows:
            row.pop("seconds", None)
        loops = trainer.fit_loop.state_dict()
        ended[kind] = (called, rows, loops, trainer.callback_metrics, task.model.state_dict())
    (called, *more, weights), (expected_calls, *expected, expected_weights) = ended.values()
    assert called == expected_calls
    assert more == expected
    assert len(called) == 8 * (len(HOOKS) + len(HOOKS[1:]) + len(own)) + _evaluated(own)
    torch.testing.assert_close(weights, expected_weights, rtol=0, atol=0)


def _evaluated(own):
    # Validation moves its one batch in each epoch too.
    return 2 * len(set(own) & set(TRANSFER))


def test_nothing_is_asked_that_nobody_has(train):
    task = seeded(ClassificationTask)
    steps = []

    class Look(Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            steps.append(trainer.fit_loop.epoch_loop._lean_step._hooks)

    train("run", task, [Look()])
    (hooks,) = {tuple(sorted((name, len(found)) for name, found in one.items())) for one in steps}
    asked = {name: count for name, count in hooks if count}
    assert asked.keys() == {"on_train_batch_start", "on_train_batch_end"}


def changed(**options):
    return lambda trainer: [setattr(trainer, name, value) for name, value in options.items()]


class Ends(ClassificationTask):
    """Ends each epoch before its third batch, which only Lightning's own step allows for."""

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 2 else None


class Accumulates(ClassificationTask):
    """Steps at every other batch, as Lightning's pages on ``optimizer_step`` show."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        if batch_idx % 2:
            return super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        return optimizer_closure()


def test_a_step_that_may_not_be_one_is_lightnings(train, monkeypatch):
    monkeypatch.setattr(LeanStep, "__call__", None)
    train("accumulates", seeded(Accumulates))


class Returns(ClassificationTask):
    """Returns what Lightning allows for, beside a loss alone: more, or nothing."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 2 else {"loss": loss, "images": len(batch["label"])}


def test_a_step_returns_what_it_may(train, monkeypatch):
    ended = []
    for serves in (LeanStep.serves, lambda trainer: False):
        monkeypatch.setattr(LeanStep, "serves", staticmethod(serves))
        seen = []

        class Look(Callback):
            def on_train_batch_end(self, trainer, pl_module, outputs, *_, seen=seen):
                seen.append((trainer.fit_loop.epoch_loop._lean_step is None, noted(outputs)))

        task = seeded(Returns)
        train(f"returns{len(ended)}", task, [Look()])
        ended.append((seen, task.model.state_dict()))
    (lean, weights), (own, expected) = ended
    assert [outputs for _, outputs in lean] == [outputs for _, outputs in own]
    assert {outputs.get("images") for _, outputs in lean} == {6, None}
    assert ({is_own for is_own, _ in lean}, {is_own for is_own, _ in own}) == ({False}, {True})
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)


def test_a_task_may_end_an_epoch(train, monkeypatch):
    monkeypatch.setattr(LeanStep, "__call__", None)
    assert train("ends", seeded(Ends)).global_step == 4


@pytest.mark.parametrize(
    "options", [{"accumulate_grad_batches": 2}, {"profiler": "simple"}, {"precision": "64-true"}]
)
def test_what_only_lightnings_own_step_can_do_is_left_to_it(train, monkeypatch, options):
    monkeypatch.setattr(LeanStep, "__call__", None)
    assert train("run", seeded(ClassificationTask), **options).global_step in (4, 8)


def averaging():
    strategy = DDPStrategy(model_averaging_period=2)
    strategy._model_averager = object()
    return strategy


def scheduled(**options):
    config = SimpleNamespace(interval="step", frequency=1, reduce_on_plateau=False)
    return SimpleNamespace(**{**vars(config), **options})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"profiler": SimpleProfiler()},
        {"precision_plugin": MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))},
        {"strategy": object()},
        {"strategy": averaging()},
        {"optimizers": [1, 2]},
        {"lr_scheduler_configs": [scheduled(interval="epoch")]},
        {"lr_scheduler_configs": [scheduled(frequency=2)]},
        {"lr_scheduler_configs": [scheduled(reduce_on_plateau=True)]},
    ],
    ids=lambda changes: next(iter(changes), "none"),
)
def test_it_serves_what_it_knows(train, changes):
    trainer = train("run", tiny_task())
    names = ("lightning_module", "precision_plugin", "profiler", "strategy", "optimizers",
             "accumulate_grad_batches", "lr_scheduler_configs")  # fmt: skip
    known = {name: getattr(trainer, name) for name in names}
    known |= {"optimizers": [1]}  # those of a run that has ended are gone
    assert LeanStep.serves(SimpleNamespace(**known | changes)) == (not changes)


def test_a_loop_that_resumes_takes_its_first_step_by_lightnings(train, monkeypatch):
    first = []
    loop = train("run", seeded(ClassificationTask)).fit_loop.epoch_loop
    monkeypatch.setattr(_TrainingEpochLoop, "advance", lambda self, fetcher: first.append(fetcher))
    loop.restarting = True
    loop.advance("fetcher")
    assert first == ["fetcher"]
