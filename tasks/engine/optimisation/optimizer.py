"""Optimisers by name, and learning-rate schedules per optimiser step."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from timm.optim import create_optimizer_v2, get_optimizer_class, get_optimizer_info, list_optimizers
from torch import nn

from backbones.options import listed, unknown
from backbones.parameters.layer_scales import Layers
from tasks.engine.optimisation.param_groups import RULES, Rule, param_groups, parameter_rules

# Optimisers of the package schedulefree, which average the weights instead of lowering the rate.
# Source: Defazio et al., "The Road Less Scheduled", 2024 (https://arxiv.org/abs/2405.15682).
SCHEDULE_FREE = {
    "schedulefree_adamw": "AdamWScheduleFree",
    "schedulefree_radam": "RAdamScheduleFree",
    "schedulefree_sgd": "SGDScheduleFree",
}
CYCLES = ("cosine", "poly", "tanh")  # schedules over the whole run
PHASES = ("wsd", "rsqrt")  # schedules with a stable phase and a final decay
DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda t: 1 - t,
    "1-sqrt": lambda t: 1 - math.sqrt(t),
    "cosine": lambda t: 0.5 * (1 + math.cos(math.pi * t)),
}


def optimizer_names() -> list[str]:
    """Return the names that ``build_optimizer`` takes, in alphabetical order."""
    names = map(str, list_optimizers())
    timms = [name for name in names if not get_optimizer_info(name).second_order]
    return sorted([*timms, *SCHEDULE_FREE])


def scaled_lr(lr: float, reference_batch: int | None, batch: int) -> float:
    """Return the rate for ``batch`` images per step; ``lr`` is for ``reference_batch`` images.

    Source: Goyal et al., "Accurate, Large Minibatch SGD", 2017, Sec. 2.1 (linear scaling).
    """
    return lr if reference_batch is None else lr * batch / reference_batch


def build_optimizer(
    model: nn.Module,
    rules: Mapping[str, Rule] | None = None,
    batch: int | None = None,
    *,
    name: str,
    lr: float,
    reference_batch: int | None = None,
    weight_decay: float = 0.0,
    layer_decay: float | None = None,
    layers: Layers | None = None,
    groups: Sequence[Mapping[str, Any]] | None = None,
    **options: Any,
) -> torch.optim.Optimizer:
    """Build an optimiser over the trainable parameters.

    Args:
        model: Its frozen parameters get no optimiser state.
        rules: Rate and decay of its parameters by name, if ``optimizer_rules`` was asked before;
            the three options of them are then not looked at.
        batch: Images of an optimiser step, over all processes and accumulated batches; None leaves
            ``lr`` as it is.
        name: One of ``optimizer_names()``, with timm's defaults; "sgd" is torch's, without
            momentum unless given, and timm's of that name is "nesterov". Those of
            ``SCHEDULE_FREE`` are in training mode, see ``ScheduleFreeAverage``.
        lr: Learning rate at the top of the schedule.
        reference_batch: ``lr`` is for so many images a step and scaled linearly to ``batch``; None
            for a rate that does not depend on it.
        weight_decay: Decay of matrices and kernels that the backbone's authors do not exempt.
        layer_decay: See ``parameter_rules``.
        layers: See ``parameter_rules``.
        groups: See ``parameter_rules``.
        **options: torch's or timm's own, such as ``betas`` or ``momentum``.

    Raises:
        ValueError: Unknown name or option, or a value out of range.
    """
    create = optimizer_class(name)
    _refuse(lr <= 0, f"optimizer.lr must be above 0, got {lr}")
    wrong = reference_batch is not None and reference_batch < 1
    _refuse(wrong, f"optimizer.reference_batch must be at least 1 or null, got {reference_batch}")
    rate = lr if batch is None else scaled_lr(lr, reference_batch, batch)
    names = inspect.signature(create).parameters.keys() - {"params"}
    strange = sorted(options.keys() - names)
    _refuse(bool(strange), f"{name} has no option {strange}; it has {listed(sorted(names))}")
    count = _num_betas(name, create)
    betas = options.get("betas", (0,) * count)
    wrong = not isinstance(betas, list | tuple) or len(betas) != count
    _refuse(wrong, f"optimizer.betas must be {count} numbers such as [0.9,0.999], got {betas}")
    if rules is None:
        rules = parameter_rules(
            model, weight_decay, layer_decay=layer_decay, layers=layers, groups=groups
        )
    try:
        parameters = param_groups(model, rules, rate)
        if name == "sgd":
            return torch.optim.SGD(parameters, lr=rate, **options)
        if name in SCHEDULE_FREE:
            optimizer: Any = create(parameters, lr=rate, **options)
            optimizer.train()
            return optimizer
        return create_optimizer_v2(parameters, name, lr=rate, **options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} refuses its options {options}: {error}") from error


def optimizer_class(name: str) -> Callable[..., torch.optim.Optimizer]:
    """Return the class of an optimiser.

    Raises:
        ValueError: Unknown name, a second-order optimiser or a package that is missing.
    """
    if name == "sgd":
        return torch.optim.SGD
    names = optimizer_names()
    if name == "adahessian":
        raise ValueError(
            "optimizer.name=adahessian needs second derivatives in each step, which training here "
            "does not compute; pass another name, such as optimizer.name=adamw"
        )
    if name not in names:
        raise ValueError(unknown("optimiser (optimizer.name)", name, names))
    if name in SCHEDULE_FREE:
        try:
            return getattr(importlib.import_module("schedulefree"), SCHEDULE_FREE[name])
        except ImportError as error:
            raise ValueError(
                f"optimizer.name={name} needs the package schedulefree: "
                'pip install "mixerlab[schedulefree]"'
            ) from error
    try:
        return get_optimizer_class(name, bind_defaults=False)
    except (ImportError, AssertionError) as error:  # timm asserts that there is a GPU
        package = str(get_optimizer_info(name).opt_class).partition(".")[0]
        torch_name = name.removeprefix("fused").removeprefix("bnb").removesuffix("8bit")
        raise ValueError(
            f"optimizer.name={name} needs an NVIDIA GPU and the package {package}; install it, or "
            f"pass optimizer.name={torch_name if torch_name in names else 'adamw'}"
        ) from error


def _num_betas(name: str, create: Callable[..., torch.optim.Optimizer]) -> int:
    if name not in SCHEDULE_FREE:
        return get_optimizer_info(name).num_betas
    betas = inspect.signature(create).parameters.get("betas")
    return 0 if betas is None else len(betas.default)


def check_optimizer(options: Mapping[str, Any]) -> None:
    """Refuse what ``build_optimizer`` would, but for rates by layer and groups, at once.

    torch and timm look at their options only where they get parameters; one number will do.

    Raises:
        ValueError: Unknown name or option, or a value out of range.
    """
    own_options = {key: value for key, value in options.items() if key not in RULES}
    build_optimizer(nn.Linear(1, 1, bias=False), **own_options)


def optimizer_rules(model: nn.Module, options: Mapping[str, Any]) -> dict[str, Rule]:
    """Rate and decay of each parameter, by its name, from the options of ``build_optimizer``."""
    rules = {key: options[key] for key in RULES if key in options}
    return parameter_rules(model, options.get("weight_decay", 0.0), **rules)


def learning_rate_factor(
    steps: int,
    steps_per_epoch: int,
    lr: float = 1.0,
    *,
    name: str,
    warmup: float = 0.0,
    warmup_start: float | None = None,
    warmup_lr: float | None = None,
    warmup_within: bool = False,
    min_lr_ratio: float | None = None,
    min_lr: float | None = None,
    cooldown: float = 0.0,
    by_epoch: bool = False,
    lag: int = 0,
    milestones: Sequence[float] = (),
    gamma: float = 0.1,
    power: float = 1.0,
    decay_epochs: float | None = None,
    decay_fn: str | None = None,
    stable_timescale: float | None = None,
) -> Callable[[int], float]:
    """Make the function that gives the learning rate of each optimiser step over the top rate.

    Args:
        steps: Optimiser steps of the whole run.
        steps_per_epoch: Optimiser steps of one epoch.
        lr: The top rate, which ``warmup_lr`` and ``min_lr`` are compared with.
        name: "cosine", "poly", "tanh", "step", "multistep", "wsd" (warmup, stable, decay), "rsqrt"
            (inverse square root with a final decay) or "constant".
        warmup: Epochs of linear warm-up; they are part of the run.
        warmup_start: First rate over the top rate; 0.001 if ``warmup_lr`` is not given either.
        warmup_lr: First rate itself.
        warmup_within: Cosine, poly and tanh begin with the run, and warm-up replaces their
            beginning, as in timm's schedulers; else they begin after it, at the top rate.
        min_lr_ratio: Last rate over the top rate, for all but the steps and "constant"; 0 if
            ``min_lr`` is not given either.
        min_lr: Last rate itself.
        cooldown: Epochs at the last rate, at the end of the run.
        by_epoch: The rate moves at the beginning of each epoch only, as in timm's script.
        lag: With ``by_epoch``, epochs that the schedule is late: 1 in DeiT's script, which sets the
            rate of an epoch at its end.
        milestones: Epochs at which "multistep" multiplies the rate by ``gamma``.
        gamma: See ``milestones`` and ``decay_epochs``.
        power: Exponent of "poly".
        decay_epochs: "step": epochs after which the rate is multiplied by ``gamma``, again and
            again; 90 by default. "wsd" and "rsqrt": epochs of the final decay, or below 1 its share
            of what follows the warm-up; 0.2 by default.
        decay_fn: Shape of that decay: "linear", "1-sqrt" or "cosine"; by default "1-sqrt" for "wsd"
            and "linear" for "rsqrt".
        stable_timescale: Epochs by which the rate of "rsqrt" falls to ``1 / sqrt(2)``; the warm-up
            by default.

    Source: timm's schedulers of the same names, which tests/tasks/test_optim.py compares.

    Raises:
        ValueError: Unknown name, a value out of range, or a rate given in both ways.
    """
    first = _share("warmup_start", warmup_start, "warmup_lr", warmup_lr, lr, usual=1e-3)
    last = _share("min_lr_ratio", min_lr_ratio, "min_lr", min_lr, lr, usual=0.0)
    shapes: dict[str, Callable[[float], float]] = {
        "cosine": lambda t: last + (1 - last) * 0.5 * (1 + math.cos(math.pi * t)),
        "poly": lambda t: last + (1 - last) * (1 - t) ** power,
        "tanh": lambda t: last + (1 - last) * 0.5 * (1 - math.tanh(10 * t - 7)) * (t < 1),
        "constant": lambda t: 1.0,
    }
    names = [*shapes, "step", "multistep", *PHASES]
    _refuse(name not in names, f"schedule.name must be one of {', '.join(names)}, got {name!r}")
    for option, value in (("warmup", warmup), ("cooldown", cooldown)):
        _refuse(value < 0, f"schedule.{option} must not be below 0, got {value}")
    for option, value in (("gamma", gamma), ("power", power)):
        _refuse(value < 0, f"schedule.{option} must not be below 0, got {value}")
    ending = (*CYCLES, *PHASES)
    idle = bool(cooldown) and name not in ending
    _refuse(
        idle,
        f"schedule.cooldown={cooldown} is for {', '.join(ending)}; with {name} set it to 0",
    )
    _refuse(lag < 0, f"schedule.lag must not be below 0, got {lag}")
    late = bool(lag) and not by_epoch
    _refuse(late, f"schedule.lag={lag} is for schedule.by_epoch=true; pass both or schedule.lag=0")
    warmup_steps = round(warmup * steps_per_epoch)
    start = 0 if warmup_within else warmup_steps
    end = steps - round(cooldown * steps_per_epoch)
    every = (90.0 if decay_epochs is None else decay_epochs) * steps_per_epoch
    _refuse(every <= 0, f"schedule.decay_epochs must be above 0, got {decay_epochs}")
    if name in PHASES:
        phases = _phases(
            name, end - warmup_steps, steps_per_epoch, last, decay_epochs=decay_epochs,
            decay_fn=decay_fn, timescale=warmup if stable_timescale is None else stable_timescale,
        )  # fmt: skip

    def factor(step: int) -> float:
        if by_epoch:
            step = max(0, step // steps_per_epoch - lag) * steps_per_epoch
        if step < warmup_steps:
            return first + (1 - first) * step / warmup_steps
        if name == "multistep":
            epoch = step / steps_per_epoch
            return float(gamma ** sum(epoch >= milestone for milestone in milestones))
        if name == "step":
            return float(gamma ** ((step - warmup_steps) // every))
        if name in PHASES:
            return phases(step - warmup_steps)
        return shapes[name](min(1.0, (step - start) / max(1, end - start)))

    return factor


def _phases(
    name: str,
    steps: int,
    steps_per_epoch: int,
    last: float,
    *,
    decay_epochs: float | None,
    decay_fn: str | None,
    timescale: float,
) -> Callable[[int], float]:
    """Make "wsd" or "rsqrt" over the steps after the warm-up."""
    shape = decay_fn or {"wsd": "1-sqrt", "rsqrt": "linear"}[name]
    _refuse(shape not in DECAYS, f"schedule.decay_fn must be one of {', '.join(DECAYS)}, "
                                 f"got {decay_fn!r}")  # fmt: skip
    share = 0.2 if decay_epochs is None else decay_epochs
    decayed = round(share * (steps if share < 1 else steps_per_epoch))
    unscaled = name == "rsqrt" and timescale <= 0
    _refuse(unscaled, "schedule.name=rsqrt needs schedule.stable_timescale=<epochs> or a warm-up")

    def factor(step: int) -> float:
        stable = 1.0
        if name == "rsqrt":
            stable = max(last, (1 + step / (timescale * steps_per_epoch)) ** -0.5)
        position = step - (steps - decayed)
        if position <= 0:
            return stable
        return last + (stable - last) * DECAYS[shape](min(position / max(1, decayed), 1.0))

    return factor


def _share(
    ratio_name: str,
    ratio: float | None,
    rate_name: str,
    rate: float | None,
    lr: float,
    *,
    usual: float,
) -> float:
    """Return a rate over the top rate, given as such or as the rate itself."""
    has_both = ratio is not None and rate is not None
    _refuse(has_both, f"schedule.{rate_name} and schedule.{ratio_name} exclude each other; "
                  f"set one of them to null")  # fmt: skip
    if rate is None:
        share = usual if ratio is None else ratio
        _refuse(not 0 <= share <= 1, f"schedule.{ratio_name} must be from 0 to 1, got {share}")
        return share
    _refuse(
        not 0 <= rate <= lr,
        f"schedule.{rate_name}={rate} must be from 0 to the top rate, which is {lr:g} for this "
        f"batch; pass a lower schedule.{rate_name}, or a larger batch or rate",
    )
    return rate / lr


def _refuse(wrong: bool, message: str) -> None:
    if wrong:
        raise ValueError(message)
