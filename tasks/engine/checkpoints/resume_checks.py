"""Check that a run can resume from a checkpoint, before any part of it is used."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from backbones.checkpoints.adoption import refuse_other_model
from backbones.checkpoints.opening import Checkpoint
from backbones.checkpoints.seal import DamagedCheckpoint
from tasks.engine.base import BaseTask
from tasks.engine.checkpoints.entries import EMA, UNREPORTED
from tasks.engine.optimisation.optimizer import build_optimizer

# Entries that training needs.
NEEDED = (
    "state_dict", "random_state", "callbacks", "optimizer_states", "lr_schedulers",
    "pytorch-lightning_version",
)  # fmt: skip
# Flags that this run's device decides, and those in which the scheduler notes where it is.
FREE_FLAGS = ("fused", "_is_initial", "_get_lr_called_within_step")


def check_continues(checkpoint: Checkpoint, task: BaseTask, *, sharded: bool = False) -> None:
    """Check that a checkpoint holds all of a training run of this task's model and optimiser.

    Args:
        checkpoint: After ``open_own``, which checks the form of each part.
        task: The run's.
        sharded: True if the run's processes share out the weights.

    Raises:
        DamagedCheckpoint: A part is missing, or of another form than this run's.
        ValueError: Weights of another model.
    """
    content, path = checkpoint.content, checkpoint.path
    missing = [name for name in NEEDED if name not in content]
    if missing:
        raise _damaged(path, f"the entry {missing[0]} is missing")
    # Training resumes from the weights, which the average must match in form.
    for name in ("state_dict", EMA, UNREPORTED):
        if name in content:
            refuse_other_model(task.model, content[name], path)
    task.check_code(checkpoint, resumes=True)
    task.follow_rules(content)
    states, schedules = content["optimizer_states"], content["lr_schedulers"]
    if len(states) != 1 or len(schedules) != 1:
        raise _damaged(path, "optimizer_states and lr_schedulers must have one entry each")
    if sharded:
        return  # torch itself compares the states of sharded weights, by name
    optimizer = build_optimizer(task.model, task._rules, **task.optimizer_options)
    schedule = LambdaLR(optimizer, lambda step: 1.0).state_dict()
    groups = optimizer.state_dict()["param_groups"]
    problem = (
        _misfit(states[0]["param_groups"], groups, "param_groups")
        or _misfit(schedules[0], schedule, "lr_schedulers.0")
        or next((f"lr_schedulers.0.{k} is unknown" for k in schedules[0].keys() - schedule), None)
        or _state_misfit(states[0], optimizer)
    )
    if problem is not None:
        raise _damaged(path, problem)


def _damaged(path: str, problem: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(
        f"{path} cannot be resumed: {problem}; pass another checkpoint of the "
        "run, or the settings that it was trained with"
    )


def _misfit(file_value: Any, run_value: Any, place: str) -> str | None:
    """Describe where values differ in form: keys, lengths, types and flags, not numbers.

    Flags may be missing, as torch adds them from release to release.
    """
    if isinstance(run_value, Mapping):
        if not isinstance(file_value, Mapping):
            return f"{place} must be a dictionary"
        flags = {
            key: flag for key, flag in run_value.items() if flag is None or isinstance(flag, bool)
        }
        complete = {**flags, **file_value}
        items = [(f"{place}.{key}", complete.get(key), value) for key, value in run_value.items()]
    elif isinstance(run_value, list | tuple):
        if not isinstance(file_value, list | tuple) or len(file_value) != len(run_value):
            return f"{place} must be a list of {len(run_value)}"
        items = [
            (f"{place}.{i}", *pair)
            for i, pair in enumerate(zip(file_value, run_value, strict=True))
        ]
    elif run_value is None or isinstance(run_value, bool):
        is_free = place.endswith(FREE_FLAGS) and isinstance(file_value, bool)
        return (
            None
            if is_free or file_value is run_value or file_value is bool(run_value)
            else f"{place} must be {run_value}"
        )
    elif isinstance(run_value, Tensor) and run_value.ndim:
        fits = isinstance(file_value, Tensor) and file_value.shape == run_value.shape
        return None if fits else f"{place} must be a tensor of {tuple(run_value.shape)}"
    elif isinstance(run_value, torch.dtype):
        return None if file_value == run_value else f"{place} must be {run_value}"
    else:
        right = (
            type(file_value) is type(run_value)
            if isinstance(run_value, int | str)
            else _is_number(file_value)
        )
        return None if right else f"{place} must be of type {type(run_value).__name__}"
    return next(filter(None, (_misfit(*item[1:], item[0]) for item in items)), None)


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value)


def _state_misfit(file_state: Mapping[str, Any], optimizer: Optimizer) -> str | None:
    """Describe a parameter whose state has another form than the optimiser would give it."""
    groups = zip(file_state["param_groups"], optimizer.param_groups, strict=True)
    parameters = {
        key: parameter
        for saved, group in groups
        for key, parameter in zip(saved["params"], group["params"], strict=True)
    }
    probes = _probe(optimizer, {parameter.shape for parameter in parameters.values()})
    for key, state in file_state["state"].items():
        if key not in parameters:
            return f"optimizer_states.0.state.{key} is of no parameter"
        expected = probes[parameters[key].shape]
        if state.keys() != expected.keys():
            return f"optimizer_states.0.state.{key} must have {', '.join(expected) or 'no entry'}"
        for name, value in expected.items():
            place = f"optimizer_states.0.state.{key}.{name}"
            problem = _misfit(state[name], value, place)
            if problem is not None:
                return problem
    return None


def _probe(optimizer: Optimizer, shapes: set[torch.Size]) -> dict[torch.Size, dict[str, Any]]:
    """Return the state that a first step gives to a parameter of each shape."""
    parameters = inspect.signature(type(optimizer)).parameters
    options = {key: value for key, value in optimizer.defaults.items() if key in parameters}
    probes = {shape: torch.ones(shape, requires_grad=True) for shape in shapes}
    group = {**optimizer.defaults, "params": list(probes.values())}  # not all are arguments
    trial: Any = type(optimizer)([group], **options)
    if hasattr(trial, "train"):  # a schedule-free optimiser
        trial.train()
    for probe in probes.values():
        probe.grad = torch.ones_like(probe)
    trial.step()
    return {shape: trial.state[probe] for shape, probe in probes.items()}
