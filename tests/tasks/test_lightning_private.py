"""Each private symbol of Lightning in lightning_private.py behaves as that file expects."""

import ast
import importlib
import inspect
import re
import signal
from collections import Counter
from types import SimpleNamespace

import lightning
import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.optimization.automatic import ClosureResult, _AutomaticOptimization
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies.launchers import subprocess_script
from lightning.pytorch.trainer.call import _call_strategy_hook
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from torch.utils.data import DataLoader

from tasks.engine.checkpoints.data_position import Position
from tasks.engine.loops import lightning_private
from tasks.engine.loops.lightning_private import LIGHTNING, loop_state, use_exact_loops
from tests.runs import QUIET, ROOT

BATCHES = 3
PACKAGES = ("backbones", "heads", "datamodules", "tasks", "tools")


class Line(LightningModule):
    """Weight that falls by the mean gradient, which is 1 for each batch."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(self.layer.weight)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val/x", batch.mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def train_dataloader(self):
        return DataLoader(torch.ones(BATCHES, 1))

    val_dataloader = train_dataloader


class Spy(Callback):
    """Collect the results of ``look(trainer)`` after each training batch."""

    def __init__(self, look):
        self.look, self.seen = look, []

    def on_train_batch_end(self, trainer, *_):
        self.seen.append(self.look(trainer))


def make_trainer(folder, *callbacks, exact=False, **options):
    options = {**QUIET, "num_sanity_val_steps": 0, "max_epochs": 1, **options}
    trainer = Trainer(default_root_dir=folder, callbacks=list(callbacks), **options)
    if exact:
        use_exact_loops(trainer)
    return trainer


def seen(folder, look, **options):
    spy = Spy(look)
    make_trainer(folder, spy, **options).fit(Line())
    return spy.seen


def test_the_file_names_the_tested_version():
    assert lightning.__version__ == LIGHTNING
    assert f"lightning=={LIGHTNING}\n" in (ROOT / "constraints.txt").read_text()
    assert f"Lightning {LIGHTNING}" in lightning_private.__doc__


@pytest.mark.parametrize(
    ("owner", "name", "calls"),
    [
        (_AutomaticOptimization, "_training_step", BATCHES),
        (_TrainingEpochLoop, "_should_check_val_fx", BATCHES),
        (_FitLoop, "_iteration_based_training", 1),
        (_SignalConnector, "_register_signal", 1),
        (ModelCheckpoint, "_monitor_candidates", 1),
        (RichProgressBar, "_get_train_description", 1),
    ],
)
def test_lightning_calls_the_overridden_methods(owner, name, calls, tmp_path, monkeypatch):
    counted = Counter()
    own, static = getattr(owner, name), isinstance(vars(owner)[name], staticmethod)

    def count(*args, **options):
        counted[name] += 1
        return own(*args, **options)

    monkeypatch.setattr(owner, name, staticmethod(count) if static else count)
    best = ModelCheckpoint(tmp_path, monitor="val/x")
    options = {"enable_checkpointing": True, "enable_progress_bar": True}
    make_trainer(tmp_path, best, RichProgressBar(), **options).fit(Line())
    assert counted[name] >= calls


def test_launch_process_observer_gets_the_started_processes(monkeypatch):
    own, processes, watched = subprocess_script._launch_process_observer, [object()], []
    environment = SimpleNamespace(
        validate_settings=lambda **_: None, creates_processes_externally=False
    )
    launcher = subprocess_script._SubprocessScriptLauncher(environment, 2, 1)
    monkeypatch.setattr(
        launcher, "_call_children_scripts", lambda: launcher.procs.extend(processes)
    )
    with lightning_private.watching_processes(watched.extend):
        launcher.launch(lambda: None)
    assert watched == processes
    assert subprocess_script._launch_process_observer is own


@pytest.mark.parametrize(("exact", "last"), [(False, 0.5), (True, 1.0)])
def test_training_step_divides_by_the_batches_of_the_step(exact, last, tmp_path):
    """Three batches in steps of two: Lightning halves the gradient of the last batch."""
    task = Line()
    make_trainer(tmp_path, exact=exact, accumulate_grad_batches=2).fit(task)
    assert task.layer.weight.item() == -(1.0 + last)


def test_closure_result_and_call_strategy_hook(tmp_path):
    result = ClosureResult.from_training_step_output(torch.tensor(6.0), 3)
    assert float(result.closure_loss) == 2.0

    def step(trainer):
        return _call_strategy_hook(trainer, "training_step", torch.ones(1, 1), 0).shape

    assert seen(tmp_path, step) == [()] * BATCHES


@pytest.mark.parametrize(
    ("look", "expected", "options"),
    [
        (lambda loop: loop.epoch_loop._should_accumulate(), [True, False, False], {}),
        (lambda loop: loop.epoch_loop._should_check_val_epoch(), [True, True, True], {}),
        (lambda loop: loop.epoch_loop._num_ready_batches_reached(), [False, False, True], {}),
        (lambda loop: loop.epoch_loop._is_training_done, [False, False, True], {}),
        (lambda loop: loop.epoch_loop._batches_that_stepped, [0, 0, 1], {}),
        (lambda loop: loop.epoch_loop.batch_progress.total.ready, [1, 2, 3], {}),
        (lambda loop: loop._data_fetcher.done, [False, False, True], {}),
        (lambda loop: loop._can_stop_early, [False, True, True],
         {"min_epochs": 0, "min_steps": 2, "accumulate_grad_batches": 1}),
    ],
    ids=lambda look: look.__code__.co_names[-1] if callable(look) else "",
)  # fmt: skip
def test_the_loops_know(look, expected, options, tmp_path):
    options = {"accumulate_grad_batches": 2, **options}
    assert seen(tmp_path, lambda trainer: look(trainer.fit_loop), **options) == expected


def test_connectors_of_signals_and_accelerators(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer._signal_connector = used = _Registering(trainer)
    trainer.fit(Line())
    assert used.signals == {signal.SIGTERM}
    environment = trainer._accelerator_connector.cluster_environment
    assert isinstance(environment, LightningEnvironment)


class _Registering(_SignalConnector):
    def __init__(self, trainer):
        super().__init__(trainer)
        self.signals = set()

    def register_signal_handlers(self):
        before = signal.getsignal(signal.SIGTERM)
        super().register_signal_handlers()
        if signal.getsignal(signal.SIGTERM) != before:
            self.signals.add(signal.SIGTERM)


def test_loop_state_has_the_keys_of_the_loops(tmp_path):
    loop = make_trainer(tmp_path, exact=True).fit_loop
    fresh = loop.state_dict()
    state = loop_state(fresh, Position(4, 4, BATCHES, 1))
    assert state.keys() == fresh.keys()
    for key, value in state.items():
        assert _keys(value) == _keys(fresh[key]), key
    loop.load_state_dict(state)
    assert (loop.epoch_loop.global_step, loop.epoch_loop.total_batch_idx) == (4, 3)


def _keys(value):
    return {key: _keys(one) for key, one in value.items()} if isinstance(value, dict) else None


@pytest.mark.parametrize("package", PACKAGES)
def test_other_files_use_public_interfaces_only(package):
    found = []
    for file in (ROOT / package).rglob("*.py"):
        text = file.read_text()
        suspect = re.search(r"lightning|unittest|(trainer|loop|strategy|launcher)\._[a-z]", text)
        if file.name == "lightning_private.py" or not suspect:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("lightning"):
                found += [(file.name, one.name) for one in node.names if one.name[0] == "_"]
            elif isinstance(node, ast.ImportFrom | ast.Import) and "unittest" in ast.unparse(node):
                found.append((file.name, ast.unparse(node)))  # patching is for tests
            elif isinstance(node, ast.Attribute) and re.match("_[a-z]", node.attr):
                of_lightning = re.search(r"(^|\.)(trainer|\w*loop|strategy|launcher)$",
                                         ast.unparse(node.value))  # fmt: skip
                found += [(file.name, ast.unparse(node))] if of_lightning else []
    assert not found


@pytest.mark.parametrize("package", ["tasks.engine", "tools.runs"])
def test_other_files_override_public_methods_only(package):
    for file in sorted((ROOT / package.replace(".", "/")).glob("[!_]*.py")):
        if file.name == "lightning_private.py":
            continue
        module = importlib.import_module(f"{package}.{file.stem}")
        for _, one in inspect.getmembers(module, inspect.isclass):
            if one.__module__ == module.__name__:
                bases = [base for base in one.__mro__ if base.__module__.startswith("lightning.")]
                own = {name for name in vars(one) if re.match("_[a-z]", name)} - {"_abc_impl"}
                assert not own & {name for base in bases for name in vars(base)}, one
