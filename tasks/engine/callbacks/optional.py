"""Builds the callbacks and the profiler that a config asks for."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import DeviceStatsMonitor, LearningRateMonitor
from lightning.pytorch.profilers import AdvancedProfiler, Profiler, SimpleProfiler

from backbones.options import unknown
from tasks.engine.callbacks.monitors import GradientNorm, StopEarly, TopCheckpoints
from tasks.engine.callbacks.profiling import ShowProfile, TorchProfile
from tasks.engine.family import Direction, imported


def make_callbacks(
    checkpoints: Path,
    monitor: str,
    metrics: Mapping[str, Direction],
    /,
    *,
    early_stopping: Mapping[str, Any],
    top_k: int = 0,
    learning_rate: bool = False,
    device: bool = False,
    gradient_norm: int = 0,
    **extras: Mapping[str, Any],
) -> list[Callback]:
    """Make the callbacks of a config's group ``callbacks``.

    Args:
        checkpoints: Folder of the run's checkpoints.
        monitor: The metric that chooses the best checkpoint.
        metrics: All that validation gives, with their directions.
        early_stopping: Options of ``early_stopping``.
        top_k: Number of best checkpoints to keep besides the best one.
        learning_rate: Log the rate of each group of parameters.
        device: Log the use of processor, memory and GPU.
        gradient_norm: Steps between two entries of the norm of the gradients; 0: none.
        **extras: Callbacks of the user: each a ``_target_``, the dotted name of a class that can be
            imported, with its arguments. Only typed words and config files name them.

    Raises:
        ValueError: An unknown metric, a number out of range, or a target that is not a callback.
    """
    for name, value in (("top_k", top_k), ("gradient_norm", gradient_norm)):
        if value < 0:
            raise ValueError(f"callbacks.{name}={value} is too low; 0 is none")
    callbacks = stop_early(monitor, metrics, **early_stopping)
    if top_k:
        callbacks.append(
            TopCheckpoints(checkpoints, monitor, metrics[monitor.partition("/")[2]], top_k)
        )
    if learning_rate:
        callbacks.append(LearningRateMonitor(logging_interval="step"))
    if device:
        if importlib.util.find_spec("psutil") is None:
            raise ValueError(
                "callbacks.device=true needs the package psutil: "
                "pip install -c constraints.txt psutil"
            )
        callbacks.append(DeviceStatsMonitor(cpu_stats=True))
    if gradient_norm:
        callbacks.append(GradientNorm(gradient_norm))
    return [
        *callbacks,
        *(_users_callback(name, options) for name, options in extras.items()),
    ]


def _users_callback(name: str, options: Mapping[str, Any]) -> Callback:
    """Build a callback of the user."""
    place, arguments = f"callbacks.{name}", {k: v for k, v in options.items() if k != "_target_"}
    try:
        target = imported(str(options["_target_"]))
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{place}._target_={options['_target_']}: {error}") from error
    if not (isinstance(target, type) and issubclass(target, Callback)):
        raise ValueError(f"{place}._target_={options['_target_']} is not a Callback of Lightning")
    try:
        return target(**arguments)
    except TypeError as error:
        raise ValueError(f"{place}: {error}") from error


def stop_early(
    monitor: str,
    metrics: Mapping[str, Direction],
    *,
    patience: int | None = None,
    metric: str | None = None,
    mode: Direction | None = None,
    min_delta: float = 0.0,
) -> list[Callback]:
    """Build early stopping, in the metric's own direction by default; none without patience.

    Raises:
        ValueError: An unknown metric, or a number out of range.
    """
    if patience is None:
        if metric is not None:
            raise ValueError(
                f"callbacks.early_stopping.metric={metric} needs "
                "callbacks.early_stopping.patience=<validations without improvement>"
            )
        return []
    if patience < 1 or min_delta < 0:
        raise ValueError(
            f"callbacks.early_stopping has patience={patience} and min_delta={min_delta}; patience "
            "is a number of validations from 1 up, min_delta a difference from 0 up"
        )
    names = [f"val/{name}" for name in metrics] + ["train/loss"]
    target = monitor if metric is None else metric
    target = f"val/{target}" if f"val/{target}" in names else target
    if target not in names:
        raise ValueError(
            unknown("metric to watch (callbacks.early_stopping.metric)", target, names)
        )
    direction = mode or metrics.get(target.partition("/")[2], "min")  # that of train/loss
    return [StopEarly(target, patience, direction, float(min_delta))]


def make_profiler(name: str | None, folder: Path) -> tuple[Profiler | None, list[Callback]]:
    """Make the profiler that ``trainer.profiler`` names, and the callback for its table.

    Raises:
        ValueError: Unknown profiler.
    """
    if name is None:
        return None, []
    if name == "pytorch":
        return None, [TorchProfile(folder)]
    if name in ("simple", "advanced"):
        profiler = SimpleProfiler() if name == "simple" else AdvancedProfiler()
        return profiler, [ShowProfile(folder)]
    names = ["simple", "advanced", "pytorch"]
    raise ValueError(unknown("profiler (trainer.profiler)", name, names))
