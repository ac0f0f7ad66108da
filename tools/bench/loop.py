"""A training step of run.py against the step of a bare loop, by turns in one process.

Both have the same network, optimiser, schedule, clipping and data; a run has Lightning's loop, our
task, callbacks, logs and progress besides. The bare step is taken in the middle of the run's own,
and a run's step is the time from one bare step to the next, so nothing that a run does escapes.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from tasks.engine.base import BaseTask
from tools.bench.timing import CLOCKS, WARM_UP, Clock, prepare, spread, tell
from tools.cli.arguments import number
from tools.cli.tables import Record
from tools.config.config_checks import resolved
from tools.config.overrides import read
from tools.config.run_config import job_config
from tools.runs.components import build_parts
from tools.runs.logger_setup import closing_loggers

# Longer than any benchmark, and without validation, which is no part of a step.
ENDLESS = 10**6
# Whose order of files the bare steps follow, since a file that was just read is read faster.
OTHER_EPOCH = ENDLESS


class EnoughRounds(Exception):
    """Ends the training when all rounds are timed."""


class Turns(Callback):
    """Takes a bare step after each step of a run, and times both.

    Args:
        twin: A copy of the task, whose network the bare steps train.
        rounds: How often, after some to warm up.
        clock: Gives the time.

    Attributes:
        bare: Seconds of the bare steps.
        ours: Seconds of the run's.
    """

    def __init__(self, twin: BaseTask, rounds: int, clock: Clock) -> None:
        self.twin, self.rounds, self.clock = twin, rounds, clock
        self.bare: list[float] = []
        self.ours: list[float] = []
        self._steps: Iterator[None] = iter(())
        self._turn = 0
        self._mark = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give the copy the same optimiser and data."""
        self._steps = bare_steps(trainer, self.twin.to(pl_module.device))

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """End a step of the run, and take a bare one.

        Raises:
            EnoughRounds: It was the last one.
        """
        begin = self._now(pl_module.device)
        next(self._steps)
        end = self._now(pl_module.device)
        if self._turn >= WARM_UP:
            self.bare.append(end - begin)
            self.ours.append(begin - self._mark)
        self._turn += 1
        if len(self.bare) == self.rounds:
            raise EnoughRounds
        self._mark = end

    def _now(self, device: torch.device) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return self.clock()


def bare_steps(trainer: Trainer, task: BaseTask) -> Iterator[None]:
    """Train a task's network by nothing but PyTorch, a step each time.

    Args:
        trainer: Whose data, precision and clipping these steps have.
        task: The network and what makes its optimiser.
    """
    engine: Any = trainer
    task.trainer = trainer
    model, device = task.model.train(), task.device
    made: Any = task.configure_optimizers()
    optimizer, scheduler = made["optimizer"], made["lr_scheduler"]["scheduler"]
    batches = epochs(engine.datamodule.train_dataloader())
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    mixed = engine.precision == "bf16-mixed"
    for batch in batches:
        batch = task.prepare_batch(engine.strategy.batch_to_device(batch, device))
        with torch.autocast(device.type, torch.bfloat16, enabled=mixed):
            losses = model.loss(batch)
            total = torch.stack([loss for name, loss in losses.items() if "loss" in name]).sum()
        optimizer.zero_grad()
        total.backward()
        if engine.gradient_clip_val:
            nn.utils.clip_grad_norm_(weights, engine.gradient_clip_val)
        optimizer.step()
        scheduler.step()
        yield


def epochs(loader: Any) -> Iterator[Any]:
    """Batches of epochs that no run sees."""
    for epoch in itertools.count(OTHER_EPOCH):
        loader.sampler.set_epoch(epoch)
        yield from loader


def loop_records(options: Mapping[str, str], words: Sequence[str]) -> list[Record]:
    """Time a task's steps; a record of the bare loop and one of a run.

    Args:
        options: Of the command.
        words: Options of the run, as they are typed for run.py.
    """
    rounds = number("rounds", options["rounds"], least=2)
    prepare(options)
    typed = [
        f"task={options['task']}",
        f"trainer={'gpu' if options['device'] == 'cuda' else 'cpu'}",
        f"trainer.max_epochs={ENDLESS}",
        f"trainer.check_val_every_n_epoch={ENDLESS}",
        f"trainer.precision={'bf16-mixed' if options['dtype'] == 'bfloat16' else '32-true'}",
        "backbone.pretrained=false",
        *words,
    ]
    command = read([f"backbone={options['backbone']}", *typed])
    config = resolved(job_config(command.overrides, command.config))
    name = f"{config['task_name']}, {config['backbone']['name']}"
    tell(f"{name}, batch {config['data']['batch_size']}, {rounds} rounds")
    with tempfile.TemporaryDirectory() as folder:
        bare, ours = _timed(config, Path(folder), rounds, CLOCKS[options["clock"]])
    records = []
    for kind, seconds in (("bare", bare), ("run.py", ours)):
        added = [one - base for one, base in zip(seconds, bare, strict=True)]
        records.append(
            {
                "task": config["task_name"],
                "backbone": config["backbone"]["name"],
                "loop": kind,
                "batch": config["data"]["batch_size"],
                "ms": statistics.median(seconds) * 1e3,
                "added_ms": statistics.median(added) * 1e3,
                **spread(seconds, bare),
            }
        )
    return records


def _timed(
    config: dict[str, Any], folder: Path, rounds: int, clock: Clock
) -> tuple[list[float], list[float]]:
    """Seconds of the bare steps, and of those of a run."""
    parts = build_parts(config, folder, resumed=False)
    engine: Any = parts.engine
    turns = Turns(copy.deepcopy(parts.task), rounds, clock)
    engine.callbacks.append(turns)
    with closing_loggers(engine.loggers), contextlib.suppress(EnoughRounds):
        engine.fit(parts.task, datamodule=parts.datamodule)
    return turns.bare, turns.ours
