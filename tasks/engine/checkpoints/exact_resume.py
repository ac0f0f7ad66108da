"""Exact resuming: save and restore the position and the random generators of a run."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim.lr_scheduler import LambdaLR

from tasks.engine.checkpoints.data_position import Position
from tasks.engine.checkpoints.files import is_chosen
from tasks.engine.loops.lightning_private import EpochLoop, loop_state
from tasks.engine.loops.process_exchange import gather_objects, refuse_together

CHECKPOINTS = "checkpoints"  # the folder of them in a run folder
LOOPS = ("fit_loop", "validate_loop", "test_loop", "predict_loop")


class ExactResume(Callback):
    """Save position and random generators with each checkpoint, and set the generators on resume.

    With the datamodules' seeded order and samples, an interrupted and resumed run ends with the
    weights of an uninterrupted one; Lightning saves neither. All is stored as tensors and plain
    values, so that a checkpoint still loads without running code.
    """

    def __init__(self) -> None:
        self._restore: dict[str, Any] | None = None
        self._expected: Position | None = None
        self._validated = 0  # the batches that were trained on when a validation last ended

    @staticmethod
    def position(checkpoint: dict[str, Any]) -> Position:
        """Return where a checkpoint was written.

        Raises:
            ValueError: The checkpoint is not one of a training run of ours.
        """
        if "position" not in checkpoint:
            raise ValueError(
                "the checkpoint holds weights only and cannot be resumed; pass the run's last.ckpt "
                "or its folder, or begin a new run with backbone.pretrained=<checkpoint>"
            )
        return Position(**checkpoint["position"])

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add position and generators.

        Raises:
            ValueError: The state of a callback holds more than plain values and tensors.
        """
        states = checkpoint.get("callbacks", {}).items()
        problems = (_state_problem(name.partition("{")[0], state) for name, state in states)
        refuse_together(next(filter(None, problems), None))
        loop = trainer.fit_loop.epoch_loop
        assert isinstance(loop, EpochLoop)
        due = self._validated != _batches(trainer) and loop.validation_follows
        checkpoint["position"] = asdict(_position(trainer, validation_due=due))
        checkpoint["random_state"] = gather_objects(random_state())

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Set Lightning's loops to the position; keep the random state until training continues."""
        self._expected = position = self.position(checkpoint)
        _follow(checkpoint.get("callbacks", {}), Path(trainer.default_root_dir) / CHECKPOINTS)
        loops = {name: getattr(trainer, name).state_dict() for name in LOOPS}
        checkpoint["loops"] = loops | {"fit_loop": loop_state(loops["fit_loop"], position)}
        self._validated = -1 if position.validation_due else position.batches
        states = checkpoint["random_state"]
        self._restore = states[trainer.global_rank % len(states)]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reject other batches than the run began with; follow the schedule.

        A run that begins has its weights by now, equal in all processes; what they draw from here
        on, such as mixup's shares and the paths to drop, is each one's own.
        """
        if self._expected is None:
            seed_process(trainer.global_rank)
            return
        now = _position(trainer, validation_due=False)
        for name, noun in (
            ("world_size", "processes"),
            ("batches_per_epoch", "batches in an epoch"),
        ):
            before, after = getattr(self._expected, name), getattr(now, name)
            if before != after:
                refuse_together(
                    f"the run to resume had {before} {noun}, now there are {after}; resume it "
                    "with the same data and devices, or start a new run"
                )
        _set_rates(trainer)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Set the random state after all loaders exist, right before the model draws from it."""
        self._set()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the random state before a validation that precedes the first training batch."""
        self._set()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember that this validation is done; comes before any checkpoint is written."""
        self._validated = _batches(trainer)

    def _set(self) -> None:
        if self._restore is not None:
            set_random_state(self._restore)
            self._restore = None


def _set_rates(trainer: Trainer) -> None:
    # The rates in a checkpoint are those of its schedule, which is another one if the run has now
    # another length; else these are the same numbers.
    for config in trainer.lr_scheduler_configs:
        scheduler = config.scheduler
        assert isinstance(scheduler, LambdaLR)
        factors = [factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
        rates = [base * factor for base, factor in zip(scheduler.base_lrs, factors, strict=True)]
        for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        scheduler._last_lr = rates


PLAIN = (str, int, float, bool, bytes, type(None), torch.Tensor, torch.nn.Parameter)


def _state_problem(name: str, state: Any) -> str | None:
    """Describe a part of a callback's state that a checkpoint cannot hold."""
    if isinstance(state, dict | list | tuple | set):
        parts = [*state.keys(), *state.values()] if isinstance(state, dict) else state
        return next(filter(None, (_state_problem(name, part) for part in parts)), None)
    if type(state) in PLAIN:
        return None
    return (
        f"the state of the callback {name} holds a {type(state).__qualname__}, but checkpoints "
        "hold tensors and plain values only; convert it in the callback's state_dict"
    )


def _follow(callbacks: Mapping[str, Any], folder: Path) -> None:
    """Point what callbacks know of checkpoints at the files of that name in the run's own folder.

    So a run folder may be moved, and a foreign checkpoint cannot name files elsewhere.
    """
    for state in callbacks.values():
        if "dirpath" not in state or not isinstance(state.get("best_k_models"), dict):
            continue
        state["dirpath"] = str(folder.resolve())
        for key in ("best_model_path", "kth_best_model_path", "last_model_path"):
            state[key] = _inside(folder, state.get(key))
        for key in {"best_k_models", "best_k_second_scores"} & state.keys():
            scores = {_inside(folder, path): score for path, score in state[key].items()}
            state[key] = {path: score for path, score in scores.items() if path}


def _inside(folder: Path, path: object) -> str:
    """Return the path of a best checkpoint in a folder by its name; empty for anything else."""
    name = Path(path).name if isinstance(path, str) else ""
    return str(folder.resolve() / name) if is_chosen(name) else ""


def seed_process(rank: int) -> None:
    """Give each process of a run random numbers of its own; the first one keeps those it has.

    Args:
        rank: Rank of this process. All were seeded with the run's seed.
    """
    if rank == 0:
        return
    seeds = np.random.SeedSequence(torch.initial_seed(), spawn_key=(rank,)).generate_state(3)
    random.seed(int(seeds[0]))
    np.random.seed(seeds[1])
    torch.manual_seed(int(seeds[2]))  # of the GPU too


def random_state() -> dict[str, Any]:
    """Return the state of a process's global generators as tensors and plain values."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    words = torch.from_numpy(np.asarray(keys).astype(np.int64))
    return {
        "python": random.getstate(),
        "numpy": [kind, words, position, has_gauss, gauss],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Set what ``random_state`` returned."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_initialized() and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])


def _batches(trainer: Trainer) -> int:
    # "ready" counts the batches begun and is right in every hook; "completed" lags behind in some.
    return int(trainer.fit_loop.epoch_loop.batch_progress.total.ready)


def _position(trainer: Trainer, *, validation_due: bool) -> Position:
    return Position(
        step=trainer.global_step,
        batches=_batches(trainer),
        batches_per_epoch=int(trainer.num_training_batches),
        world_size=trainer.world_size,
        validation_due=validation_due,
    )
