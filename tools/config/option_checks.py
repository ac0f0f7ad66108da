"""Checks of names and types of a run's options by signatures, before torch is imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backbones.options import check_types, check_value, unknown
from tasks.engine.instantiate import check_options
from tasks.engine.optimisation.automatic import AUTO, apply_fixed_schedule
from tasks.engine.run_folder.run_config import RunConfig
from tasks.engine.written_signatures import read_signature
from tools.config.training_length import OVERFIT

# Options beside the arguments of Lightning's Trainer.
EXTRA = {"compile", OVERFIT}
# Arguments of Lightning's Trainer that a run sets by itself.
OURS = {
    "barebones", "callbacks", "default_root_dir", "enable_checkpointing", "enable_model_summary",
    "limit_test_batches", "logger", "num_sanity_val_steps", "plugins", "use_distributed_sampler",
}  # fmt: skip
# Functions that take the options of a group or of a part of it.
TRAINER = "lightning.pytorch.trainer.trainer.Trainer"
EARLY = "callbacks.early_stopping"
CALLBACKS = {
    "callbacks": "tasks.engine.callbacks.optional.make_callbacks",
    EARLY: "tasks.engine.callbacks.optional.stop_early",
}


def check_all_options(config: RunConfig) -> RunConfig:
    """Check names and types of all options of a run but the backbone's, once.

    Returns:
        The config, with 10.0 as 10 where whole numbers are taken.

    Raises:
        ValueError: Names the option and what it may be.
    """
    values = check_options(apply_fixed_schedule(config))
    automatic_data = {key: value for key, value in config.data.items() if value == AUTO}
    _check_trainer(values.trainer)
    if config.mode == "fit":
        check_callbacks(config.callbacks)
    parts = {"data": values.data | automatic_data, "head": values.head, "task": values.task}
    return config.model_copy(update=parts)


def _check_trainer(options: Mapping[str, Any]) -> None:
    """Check names, types and lower bounds of a trainer's options.

    Raises:
        ValueError: An option that Lightning lacks, that the run sets, or that is out of range.
    """
    check_value("trainer.channels_last", options.get("channels_last", False), bool)
    check_value("trainer.tf32", options.get("tf32"), bool | None)
    extra = {*EXTRA, "channels_last", "tf32"}
    lightnings = {name: value for name, value in options.items() if name not in extra}
    _check_signature(TRAINER, lightnings, "trainer")
    for name in OURS & options.keys():
        tested = name == "limit_test_batches"
        remedy = "pass trainer.limit_val_batches for both" if tested else "leave it out"
        raise ValueError(f"trainer.{name} is set by the run itself; {remedy}")
    for name, least in (("check_val_every_n_epoch", 1), ("log_every_n_steps", 0)):
        if options[name] is not None and options[name] < least:
            raise ValueError(f"trainer.{name}={options[name]} is too low; the lowest is {least}")
    interval = options.get("val_check_interval")
    if isinstance(interval, int | float) and interval <= 0:
        raise ValueError(f"trainer.val_check_interval must be above 0, got {interval}")
    for name in ("accumulate_grad_batches", "limit_train_batches"):
        if options[name] is not None and options[name] <= 0:
            raise ValueError(f"trainer.{name} must be above 0, got {options[name]}")
    clip = options["gradient_clip_val"]
    if clip is not None and clip <= 0:
        raise ValueError(f"trainer.gradient_clip_val must be above 0, got {clip}; null disables it")
    if options["strategy"] == "fsdp" and options["gradient_clip_val"] is not None:
        raise ValueError(
            "Lightning cannot clip gradients that are sharded: pass trainer.gradient_clip_val=null "
            "or trainer=ddp"
        )


def check_callbacks(options: Mapping[str, Any]) -> None:
    """Check names and types of the options of callbacks.

    Raises:
        ValueError: Names the option; one of the user's own needs a ``_target_``.
    """
    for group, part in (("callbacks", options), (EARLY, options["early_stopping"])):
        _check_signature(CALLBACKS[group], part, group)
    names = read_signature(CALLBACKS["callbacks"]).types
    for name, value in options.items():
        if name not in names and not (isinstance(value, Mapping) and "_target_" in value):
            problem = unknown("option of callbacks", name, names)
            raise ValueError(f"{problem} A callback of your own is callbacks.NAME._target_=<class>")


def _check_signature(function: str, options: Mapping[str, Any], group: str) -> None:
    signature = read_signature(function)
    check_types(signature.types, signature.takes_more, options, group)
