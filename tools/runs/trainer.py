"""Lightning's Trainer as every run uses it, and what trains and evaluates with it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_only

from datamodules import BaseDataModule
from tasks.engine.base import BaseTask
from tasks.engine.callbacks.checkpoints import KeepLast
from tasks.engine.callbacks.loggers import CsvLog, RunLog
from tasks.engine.callbacks.monitors import BestCheckpoint, TimeLimit
from tasks.engine.callbacks.optional import make_profiler
from tasks.engine.callbacks.pace import Pace, PaceBar
from tasks.engine.callbacks.profiling import Unprofiled
from tasks.engine.callbacks.progress import ChannelsLast, ProgressLines
from tasks.engine.checkpoints.exact_resume import ExactResume
from tasks.engine.checkpoints.files import BEST, LAST, AtomicCheckpointIO, keep_only
from tasks.engine.devices import resolve_devices
from tasks.engine.family import Direction
from tasks.engine.loops.lightning_private import use_exact_loops, use_own_signals
from tools.config.option_checks import EXTRA
from tools.config.training_length import OVERFIT

if TYPE_CHECKING:
    from tools.runs.resume import Start

log_info = rank_zero_only(logging.getLogger(__name__).info)


def make_trainer(
    options: Mapping[str, Any],
    folder: Path,
    monitor: str,
    mode: Direction,
    *,
    training: bool,
    callbacks: Sequence[Callback] = (),
    loggers: Sequence[Logger] = (),
    checkpoint_every: float | None = None,
    fixed_size: bool = False,
) -> Trainer:
    """Build a Trainer that leaves metrics.csv and checkpoints/{last,best}.ckpt.

    Args:
        options: Arguments of Lightning's Trainer, ``channels_last`` and ``tf32``; those of
            ``EXTRA`` are left to others.
        folder: Run folder.
        monitor: Metric that chooses the best checkpoint.
        mode: "max" or "min", by which it does.
        training: Keep logs, which an evaluation does not need.
        callbacks: Besides those that every run has.
        loggers: Besides metrics.csv.
        checkpoint_every: The longest time between two last checkpoints in minutes; None or 0 has
            them at validations and ends of epochs only.
        fixed_size: All inputs have one size, for which cuDNN may search the fastest algorithms.

    Raises:
        ValueError: An option that Lightning does not have or refuses.
    """
    # Hide Lightning's remarks on devices, workers and its own products.
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)
    options = {name: value for name, value in options.items() if name not in EXTRA}
    layout = [ChannelsLast()] if options.pop("channels_last", False) else []
    set_tf32(options.pop("tf32", None))
    if options.get("benchmark") is None:
        options["benchmark"] = fixed_size and not options.get("deterministic")
    shows = options.pop("enable_progress_bar", True)
    duration = options.pop("max_time", None)
    interactive = shows and sys.stdout.isatty()
    pace = Pace()
    progress: Callback = PaceBar(pace) if interactive else ProgressLines(pace=pace)
    watching = [pace, progress] if shows else [pace]
    checkpoints = folder / "checkpoints"
    best = BestCheckpoint(
        dirpath=checkpoints,
        filename=Path(BEST).stem,
        monitor=monitor,
        mode=mode,
        save_weights_only=True,
        enable_version_counter=False,
    )
    last = KeepLast(checkpoints / LAST, checkpoint_every)
    logs = [CsvLog(folder / "metrics.csv"), *loggers]
    profiler, displays = make_profiler(options.get("profiler") if training else None, folder)
    try:
        trainer = Trainer(
            **{
                **resolve_devices(options),
                "strategy": _strategy(options["strategy"]),
                "profiler": profiler or Unprofiled(),
            },
            default_root_dir=folder,
            logger=logs if training else False,
            callbacks=[
                *layout,
                ExactResume(),
                *watching,
                *([] if duration is None or not training else [TimeLimit(duration)]),
                *callbacks,
                *displays,
                best,
                last,
            ],
            plugins=[AtomicCheckpointIO(checkpoints)],
            limit_test_batches=options["limit_val_batches"],  # the test set is the validation set
            enable_progress_bar=interactive,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,  # the datamodules' samplers know the processes
        )
    except (
        MisconfigurationException,
        ValueError,
        TypeError,
        RuntimeError,
        ImportError,
    ) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"Lightning refuses the options of trainer: {reason}") from error
    use_exact_loops(trainer)
    use_own_signals(trainer)
    _warn_crowded(trainer)
    if training:
        _describe_precision(trainer, str(options["precision"]))
    return trainer


def set_tf32(enabled: bool | None) -> None:
    """Let GPUs round the factors of float32 products to TF32, with a mantissa of 10 bits.

    Args:
        enabled: For matrix products and convolutions; None is torch's default, convolutions only.
    """
    torch.set_float32_matmul_precision("high" if enabled else "highest")
    torch.backends.cudnn.allow_tf32 = enabled is not False


def check_fit(trainer: Trainer, task: BaseTask, datamodule: BaseDataModule) -> None:
    """Reject combinations of the three before anything of the run exists.

    Raises:
        ValueError: More processes than training samples, shares of the data without a batch,
            validations further apart than there are batches, or what ``BaseTask.check_training``
            refuses.
    """
    world, samples = trainer.world_size, len(datamodule.dataset("train"))
    if samples < world:
        unit = datamodule.unit[: None if samples != 1 else -1]
        raise ValueError(
            f"the training set has {samples} {unit}, fewer than the {world} processes of "
            "trainer.devices and trainer.num_nodes; pass lower numbers"
        )
    overfit = OVERFIT if datamodule.fixed_order else None
    batches = {"train": datamodule.batches("train", world), "val": datamodule.batches("val", world)}
    for split, count in batches.items():
        name = f"limit_{split}_batches"
        share = getattr(trainer, name)
        if isinstance(share, float) and 0 < share * count < 1:
            raise ValueError(
                f"trainer.{overfit or name}={share} of {count} {split} "
                f"batch{'es' * (count != 1)} rounds down to 0; pass a number of batches from 1 on"
                + (f", or a share from {1 / count:.2g} to 1.0" if count > 1 else "")
            )
    limit = trainer.limit_train_batches
    interval = getattr(trainer, "val_check_interval", None)  # not there where it is a time
    count = batches["train"]
    count = min(count, limit) if isinstance(limit, int) else int(count * limit)
    accumulated = min(trainer.accumulate_grad_batches, count)
    examples = datamodule.training_batch(world) * world * accumulated
    task.check_training(trainer.strategy, examples)
    by_epoch = trainer.check_val_every_n_epoch is not None and trainer.limit_val_batches
    if by_epoch and isinstance(interval, int) and interval > count:
        raise ValueError(
            f"trainer.val_check_interval={interval}, but an epoch has {count} "
            f"batch{'es' * (count != 1)}; pass at most {count}, or "
            "trainer.check_val_every_n_epoch=null to count on over epochs"
        )


def _warn_crowded(trainer: Trainer) -> None:
    """Log that processes without a core of their own take minutes to start."""
    processes, cores = trainer.num_devices, os.cpu_count() or 1
    if isinstance(trainer.accelerator, CPUAccelerator) and processes > cores:
        log_info(
            f"trainer.devices={processes} starts more processes than there are cores ({cores}), "
            f"which may take minutes and much memory; trainer.devices={cores} gives each its own"
        )


def _describe_precision(trainer: Trainer, precision: str) -> None:
    """Log a precision other than the one asked for, a slow one, and one that keeps weights."""
    if precision.startswith("16") and trainer.precision == "bf16-mixed":
        log_info(
            f"trainer.precision={precision} needs a GPU: this CPU computes in bf16-mixed, with 8 "
            "bits of mantissa instead of 11"
        )
    if trainer.precision == "bf16-true":
        log_info(
            "trainer.precision=bf16-true keeps the weights in bfloat16, which loses changes below "
            "1/512 of a weight: at learning rates such as 1e-5 most weights never move. Pass "
            "trainer.precision=bf16-mixed to train all of them"
        )
    if trainer.precision == "32-true" and trainer.strategy.root_device.type == "cuda":
        log_info(
            "Training in float32; on this GPU trainer.precision=bf16-mixed (16-mixed before the "
            "A100) is faster and takes less memory"
        )


def _strategy(name: str) -> str | DDPStrategy:
    # Processes evaluate different numbers of batches, so evaluation must not wait for the others,
    # which DDP's exchange of buffers would do. Running statistics are kept in step by
    # sync_batchnorm or, if each process normalises by its own images, by engine/batch_norm.py.
    if name != "ddp":
        return name
    return DDPStrategy(broadcast_buffers=False, gradient_as_bucket_view=True)


def fit(
    trainer: Trainer,
    task: BaseTask,
    datamodule: BaseDataModule,
    *,
    start: Start | None = None,
    keep: str = "all",
) -> dict[str, float]:
    """Train, from the start or from a checkpoint on, then evaluate the checkpoint that stays.

    Args:
        trainer: Trainer of ``make_trainer``.
        task: The model with its metrics.
        datamodule: The data.
        start: Checkpoint of a resumed run.
        keep: The option ``checkpoints``: with "last" the last checkpoint is evaluated, else the
            best one.
    """
    if start is not None:
        position = start.position
        datamodule.resume_at(position.epoch, position.batch)
        for log in trainer.loggers:
            assert isinstance(log, RunLog)
            log.resume_at(position.step, validates=position.validation_due)
        files = trainer.strategy.checkpoint_io
        assert isinstance(files, AtomicCheckpointIO)
        files.hold(start.take())
    path = None if start is None else start.path
    trainer.fit(task, datamodule=datamodule, ckpt_path=path, weights_only=True)
    folder = Path(trainer.default_root_dir) / "checkpoints"
    file = folder / (LAST if keep == "last" else BEST)
    metrics = evaluate(trainer, "test", task, datamodule, file if file.is_file() else None)
    if trainer.is_global_zero:
        keep_only(folder, keep)
    return metrics


def evaluate(
    trainer: Trainer,
    mode: str,
    task: BaseTask,
    datamodule: BaseDataModule,
    ckpt: Path | None = None,
) -> dict[str, float]:
    """Metrics of a checkpoint, or of the weights as they are.

    Args:
        trainer: Trainer of ``make_trainer``.
        mode: "validate" or "test".
        task: The model with its metrics.
        datamodule: The data.
        ckpt: A checkpoint of this trainer, which may hold its weights in parts.
    """
    run = trainer.validate if mode == "validate" else trainer.test
    results = run(task, datamodule=datamodule, ckpt_path=ckpt, weights_only=True, verbose=False)
    metrics = results[0] if results else {}  # none without a batch
    return {name.partition("/")[2]: float(value) for name, value in metrics.items()}
