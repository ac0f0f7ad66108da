"""Time training steps of run.py against steps of a plain PyTorch loop, interleaved in one process.

Both train the same network with the same optimiser, schedule, clipping and data. A run adds
Lightning's loop, our task, callbacks, logs and progress. Plain steps alternate with the run's, and
a run's step is the time between two plain steps, so it includes all of a run's work.
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
from tasks.engine.run_folder.run_config import RunConfig
from tools.bench.timing import (
    CLOCKS,
    WARM_UP,
    Clock,
    print_status,
    set_up_process,
    summarise_ratios,
)
from tools.cli.arguments import parse_integer
from tools.cli.tables import Record
from tools.config.config_checks import resolve_config
from tools.config.overrides import read_command
from tools.config.run_config import job_config
from tools.runs.components import build_components
from tools.runs.logger_setup import closing_loggers

# Longer than any benchmark; also puts validations, which belong to no step, out of reach.
ENDLESS = 10**6
# Plain steps read the files in another order, since a file is read faster right after a read.
OTHER_EPOCH = ENDLESS


class EnoughRounds(Exception):
    """Ends the training after the last timed round."""


class PlainSteps(Callback):
    """Callback that runs and times a plain step after each step of the run.

    Args:
        twin: A copy of the task; the plain steps train its network.
        rounds: Number of timed rounds, after some to warm up.
        clock: Returns the time in seconds.

    Attributes:
        bare: Seconds of the plain steps.
        ours: Seconds of the run's steps.
    """

    def __init__(self, twin: BaseTask, rounds: int, clock: Clock) -> None:
        self.twin, self.rounds, self.clock = twin, rounds, clock
        self.bare: list[float] = []
        self.ours: list[float] = []
        self._steps: Iterator[None] = iter(())
        self._turn = 0
        self._mark = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set up the copy's optimiser and data."""
        self._steps = plain_steps(trainer, self.twin.to(pl_module.device))

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Run a plain step after a step of the run.

        Raises:
            EnoughRounds: This was the last round.
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


def plain_steps(trainer: Trainer, task: BaseTask) -> Iterator[None]:
    """Train a task's network with plain PyTorch; each item is one step.

    Args:
        trainer: The run's; these steps use its data, precision and clipping.
        task: Provides the network and the optimiser.
    """
    engine: Any = trainer
    task.trainer = trainer
    model, device = task.model.train(), task.device
    configuration: Any = task.configure_optimizers()
    optimizer, scheduler = configuration["optimizer"], configuration["lr_scheduler"]["scheduler"]
    batches = repeat_epochs(engine.datamodule.train_dataloader())
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    mixed = engine.precision == "bf16-mixed"
    for batch in batches:
        batch = engine.datamodule.normalise(engine.strategy.batch_to_device(batch, device))
        batch = task.prepare_batch(batch)
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


def repeat_epochs(loader: Any) -> Iterator[Any]:
    """Yield the batches of epochs that the run itself does not reach."""
    for epoch in itertools.count(OTHER_EPOCH):
        loader.sampler.set_epoch(epoch)
        yield from loader


def time_loop(options: Mapping[str, str], words: Sequence[str]) -> list[Record]:
    """Time a task's steps; return a record of the plain loop and one of a run."""
    rounds = parse_integer("rounds", options["rounds"], least=2)
    set_up_process(options)
    arguments = [
        f"task={options['task']}",
        f"trainer={'gpu' if options['device'] == 'cuda' else 'cpu'}",
        f"trainer.max_epochs={ENDLESS}",
        f"trainer.check_val_every_n_epoch={ENDLESS}",
        f"trainer.precision={'bf16-mixed' if options['dtype'] == 'bfloat16' else '32-true'}",
        "backbone.pretrained=false",
        *words,
    ]
    command = read_command([f"backbone={options['backbone']}", *arguments])
    config = resolve_config(job_config(command.words, command.config))
    name = f"{config.task_name}, {config.backbone['name']}"
    print_status(f"{name}, batch {config.data['batch_size']}, {rounds} rounds")
    with tempfile.TemporaryDirectory() as folder:
        bare, ours = _time_steps(config, Path(folder), rounds, CLOCKS[options["clock"]])
    records = []
    for kind, seconds in (("bare", bare), ("run.py", ours)):
        overheads = [second - base for second, base in zip(seconds, bare, strict=True)]
        records.append(
            {
                "task": config.task_name,
                "backbone": config.backbone["name"],
                "loop": kind,
                "batch": config.data["batch_size"],
                "ms": statistics.median(seconds) * 1e3,
                "added_ms": statistics.median(overheads) * 1e3,
                **summarise_ratios(seconds, bare),
            }
        )
    return records


def _time_steps(
    config: RunConfig, folder: Path, rounds: int, clock: Clock
) -> tuple[list[float], list[float]]:
    """Return the seconds of the plain steps, and of the run's."""
    parts = build_components(config, folder, resumed=False)
    engine: Any = parts.engine
    turns = PlainSteps(copy.deepcopy(parts.task), rounds, clock)
    engine.callbacks.append(turns)
    with closing_loggers(engine.loggers), contextlib.suppress(EnoughRounds):
        engine.fit(parts.task, datamodule=parts.datamodule)
    return turns.bare, turns.ours
