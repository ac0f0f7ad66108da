"""A run whose classifiers are solved from a frozen backbone's features."""

from __future__ import annotations

import functools
import logging
import time
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities import rank_zero_only

from heads.frozen.features import SolveOptions
from tasks.classification.extraction import extract

log_info = rank_zero_only(logging.getLogger(__name__).info)


def solve(engine: Trainer, task: Any, datamodule: Any, seed: int) -> dict[str, float]:
    """Take the features of all images once, prepared as in evaluation, and solve classifiers.

    Args:
        engine: Lightning's trainer.
        task: Its model is solved from features.
        datamodule: Its ``plain`` gives a split prepared as in evaluation.
        seed: Seed of the run.

    Returns:
        The metrics; empty in processes after the first, which only end.

    Raises:
        ValueError: The network is to be sharded, or images are to be left out.
    """
    if isinstance(engine.strategy, FSDPStrategy):
        raise ValueError("features are taken from whole networks: pass trainer=ddp instead of fsdp")
    head = task.model
    started = time.perf_counter()
    train, test = (
        extract(
            engine,
            head,
            functools.partial(datamodule.plain, split),
            datamodule.normalise,
            len(datamodule.dataset(split)),
        )
        for split in ("train", "val")
    )
    log_info(
        f"{train.values.shape[1]} features of {len(train):,} training and {len(test):,} test "
        f"images ({time.perf_counter() - started:.0f} s)"
    )
    if not engine.is_global_zero:
        return {}
    draw = SolveOptions(seed, engine.strategy.root_device)
    metrics, remarks = head.solve(train, test, draw)
    for remark in remarks:
        log_info(remark)
    for log in engine.loggers:
        log.log_metrics({f"val/{name}": value for name, value in metrics.items()}, 0)
        log.save()
    return metrics
