"""Each private symbol of Lightning in lightning_private.py behaves as that file expects."""

import ast
import importlib
import inspect
import re

import lightning
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.optimization.automatic import ClosureResult, _AutomaticOptimization
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies.launchers import subprocess_script
from lightning.pytorch.trainer import call
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


def make_trainer(folder, *callbacks, exact=False, **options):
    options = {**QUIET, "num_sanity_val_steps": 0, "max_epochs": 1, **options}
    trainer = Trainer(default_root_dir=folder, callbacks=list(callbacks), **options)
    if exact:
        use_exact_loops(trainer)
    return trainer


def test_the_file_names_the_tested_version():
    assert lightning.__version__ == LIGHTNING
    assert f"lightning=={LIGHTNING}\n" in (ROOT / "constraints.txt").read_text()
    assert f"Lightning {LIGHTNING}" in lightning_private.__doc__


# Overridden and called in lightning_private.py; tests/running has what a run does with them.
SYMBOLS = {
    _AutomaticOptimization: ("_training_step",),
    _TrainingEpochLoop: ("_should_check_val_fx", "_should_accumulate", "_should_check_val_epoch",
                         "_num_ready_batches_reached", "_is_training_done"),
    _FitLoop: ("_iteration_based_training", "_can_stop_early"),
    _SignalConnector: ("_register_signal",), ModelCheckpoint: ("_monitor_candidates",),
    RichProgressBar: ("_get_train_description",), ClosureResult: ("from_training_step_output",),
    subprocess_script: ("_launch_process_observer",), call: ("_call_strategy_hook",),
}  # fmt: skip


def test_lightning_has_the_overridden_and_called_symbols():
    for owner, names in SYMBOLS.items():
        assert not [name for name in names if name not in vars(owner)], owner


@pytest.mark.parametrize(("exact", "last"), [(False, 0.5), (True, 1.0)])
def test_training_step_divides_by_the_batches_of_the_step(exact, last, tmp_path):
    """Three batches in steps of two: Lightning halves the gradient of the last batch."""
    task = Line()
    make_trainer(tmp_path, exact=exact, accumulate_grad_batches=2).fit(task)
    assert task.layer.weight.item() == -(1.0 + last)


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


def test_other_files_use_public_interfaces_only():
    found = []
    for file in (file for package in PACKAGES for file in (ROOT / package).rglob("*.py")):
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
