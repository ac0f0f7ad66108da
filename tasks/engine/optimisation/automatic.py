"""Choose learning rate, warm-up, batch and length of a training from the size of its dataset.

The value ``auto`` leaves an option to this choice; the data configs of users' own sets use it. A
typed value wins, and dependent values follow it: the rate follows the batch, the warm-up follows
the length. The chosen values replace ``auto`` in config.yaml, and its entry ``automatic`` gives
their reasons. With a recipe or an experiment ``auto`` means the published schedule (``fixed``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.engine.devices import count_devices
from tasks.engine.family import find_family
from tasks.engine.optimisation.schedule_rule import (
    BATCH,
    BATCH_NORM,
    EPOCHS,
    INTERVAL,
    KEYS,
    MILESTONES,
    PRETRAINED,
    RANDOM,
    RATE,
    REFERENCE,
    SCALE,
    STEPS,
    WARMUP,
    ScheduleRule,
)
from tasks.engine.run_folder.run_config import RunConfig
from tasks.engine.run_folder.saved_runs import CONFIG, read_config

if TYPE_CHECKING:
    from torch import nn

Choice = tuple[Any, str]  # a value and its reason
AUTO = "auto"
CHOSEN = "automatic"  # config entry with the reason for each chosen value
# Options that are measured on the training data where the command leaves them open.
MEASURED = ("data.band_mean", "data.band_std")
# Options that pretrained weights decide where the command leaves them open.
TAKEN = (
    *(f"data.augmentation.{name}" for name in ("mean", "std", "interpolation", "crop_pct")),
    *(f"head.model.data_preprocessor.{name}" for name in ("mean", "std")),
    "head.latent_scale",
    "data.latent_scale",
)
MAX_EPOCHS = 300
MOST_ENLARGED = 2  # factor of the median image; more adds cost, but no detail
WARMUP_SHARE = 0.05  # of the run
DROPS = (8 / 12, 11 / 12)  # shares of the run; "multistep" lowers the rate there: MMDetection's 1x
VALIDATIONS = 50  # maximum per run
# Minimum number of training images per validation image, between two validations.
TRAINED_PER_VALIDATED = 2


def find_rule(task: str) -> ScheduleRule:
    """Return the schedule rule of a family.

    Raises:
        ValueError: The family lacks one.
    """
    rule = find_family(task).rule
    if rule is None:
        raise ValueError(f"task={task} lacks a rule for {AUTO}; pass numbers for {', '.join(KEYS)}")
    return rule


def auto_keys(config: RunConfig) -> list[str]:
    """Return the options, by dotted name, whose value is ``auto``."""
    return [key for key in KEYS if _get(config, key) == AUTO]


def check_auto(config: RunConfig) -> None:
    """Check that no other option contradicts an automatic learning rate.

    Raises:
        ValueError: The optimiser is not AdamW, or the rate would be scaled a second time.
    """
    optimizer = config.optimizer
    if optimizer.get("lr") != AUTO:
        return
    name, reference = optimizer.get("name"), optimizer.get("reference_batch")
    if name != "adamw":
        raise ValueError(
            f"optimizer.lr=auto is for AdamW, but optimizer.name={name}; pass optimizer.lr=<rate> "
            "too"
        )
    if reference is not None:
        raise ValueError(
            f"optimizer.reference_batch={reference} scales a typed rate, but optimizer.lr=auto "
            "already fits the batch; pass optimizer.lr=<rate>, or leave reference_batch out"
        )


def apply_fixed_schedule(config: RunConfig) -> RunConfig:
    """Return a copy of a config in which the published schedule replaces ``auto``."""
    keys = auto_keys(config)
    if not keys:
        return config
    config, values = config.model_copy(deep=True), find_rule(config.task_name).fixed
    for key in keys:
        _set(config, key, values[key])
    if RATE in keys:
        _set(config, REFERENCE, values[REFERENCE])
    return config


def is_automatic(saved: Mapping[str, Any], key: str) -> bool:
    """Return True if a run chose a value itself, or used the default of an older release."""
    if saved.get(CHOSEN):
        return key in saved[CHOSEN]
    for override in saved.get("overrides", ()):
        name, _, value = str(override).lstrip("+~").partition("=")
        is_typed = name == key or (key.startswith(f"{name}.") and value.startswith("{"))
        if is_typed or (name in ("recipe", "experiment") and value != "null"):
            return False
    return True


def reuse_choices(config: RunConfig, folder: Path) -> None:
    """Replace ``auto`` and measured options by the values of the run that is resumed.

    With another length, warm-up and milestones stay ``auto``: they are chosen for the new one.
    """
    keys, before = auto_keys(config), read_config(folder / CONFIG)
    config.data = with_measured(config.data, before)
    for key in TAKEN:
        group, *path = key.split(".")
        options = dict(getattr(config, group))
        _reuse(options, before.get(group) or {}, path)
        setattr(config, group, options)
    reasons = before.get(CHOSEN) or {}
    lengths = [key for key in (EPOCHS, STEPS) if key not in keys]
    if any(_get(config, key) != _stored_value(before, key) for key in lengths):
        keys = [key for key in keys if key not in reasons or key not in (WARMUP, MILESTONES)]
    for key in keys:
        _set(config, key, _stored_value(before, key))
    if RATE in keys:
        _set(config, REFERENCE, _stored_value(before, REFERENCE))
    if keys:
        config.automatic = {key: reasons[key] for key in keys if key in reasons}


def _reuse(options: dict[str, Any], before: Mapping[str, Any], path: Sequence[str]) -> None:
    """Copy an option of a run that a group leaves open."""
    name, *rest = path
    value = before.get(name)
    if rest and isinstance(value, Mapping):
        inner = dict(options.get(name) or {})
        _reuse(inner, value, rest)
        if inner:
            options[name] = inner
    elif not rest and value is not None and options.get(name) is None:
        options[name] = value


def with_measured(data: Mapping[str, Any], saved: Any) -> dict[str, Any]:
    """Return the options of data with what was measured for the config of a trained network."""
    before = (saved or {}).get("data") or {}
    names = [key.rpartition(".")[2] for key in MEASURED]
    facts = {key: before[key] for key in names if key in before and data.get(key) is None}
    return {**data, **(facts if data.get("bands") is not None else {})}


def choose_values(config: RunConfig, datamodule: Any, backbone: nn.Module) -> None:
    """Replace ``auto`` in the config of a training, and set the data module's batch size.

    Args:
        config: The run's config.
        datamodule: The run's data module, set up.
        backbone: The run's backbone; its norms decide the rate for random weights.
    """
    keys = auto_keys(config)
    if not keys:
        return
    rule, trainer = find_rule(config.task_name), config.trainer
    devices = count_devices(trainer) * int(trainer["num_nodes"])
    images, val_images = (len(datamodule.dataset(split)) for split in ("train", "val"))
    choices = {BATCH: (_choose_batch(rule, images, devices), f"{images} training images")}
    if SCALE in keys:
        choices[SCALE] = _choose_scale(rule.fixed[SCALE], datamodule.image_sizes())
        datamodule.set_scale(choices[SCALE][0])
    if BATCH in keys:
        _set(config, BATCH, choices[BATCH][0])
        datamodule.set_batch_size(config.data["batch_size"], config.data["eval_batch_size"])
    batches = datamodule.batches("train", devices)
    total = datamodule.training_batch(devices) * devices * batches_per_step(trainer, batches)
    start = PRETRAINED if config.backbone["pretrained"] else _find_random_start(backbone)
    choices[RATE] = _choose_rate(rule, images, total, start)
    per_epoch = steps_per_epoch(trainer, batches)
    choices |= _choose_schedule(rule, trainer, images, val_images, per_epoch)
    for key in keys:
        _set(config, key, choices[key][0])
    config.automatic = {**(config.automatic or {}), **{key: choices[key][1] for key in keys}}


def steps_per_epoch(trainer: Mapping[str, Any], batches: int) -> int:
    """Return the optimiser steps per epoch of ``batches`` batches."""
    return max(1, math.ceil(_count_taken(trainer, batches) / trainer["accumulate_grad_batches"]))


def batches_per_step(trainer: Mapping[str, Any], batches: int) -> int:
    """Return the batches per optimiser step; at most all batches of an epoch."""
    return int(min(trainer["accumulate_grad_batches"], max(1, _count_taken(trainer, batches))))


def _count_taken(trainer: Mapping[str, Any], batches: int) -> int:
    limit = trainer["limit_train_batches"]
    return min(batches, limit) if isinstance(limit, int) else int(batches * limit)


def describe_choice(config: RunConfig, images: int, per_epoch: int) -> str | None:
    """Return a line with the chosen values, or None if none were chosen."""
    keys, unit = config.automatic, find_family(config.task_name).unit
    if not keys:
        return None
    text = ", ".join(
        f"{key}={_format_value(_get(config, key))}" + f" ({keys[key]})" * (key == SCALE)
        for key in keys
    )
    epochs = config.trainer["max_epochs"]
    length = f" ({epochs * per_epoch:,} steps)" if EPOCHS in keys and epochs > 0 else ""
    return f"Chosen for {images:,} training {unit}: {text}{length}"


def describe_rate(config: RunConfig, batch: int, devices: int, accumulated: int) -> str:
    """Return a line with the learning rate of a training and its derivation.

    Args:
        config: The run's config.
        batch: Samples per batch and device.
        devices: Number of devices.
        accumulated: Batches per step and device.
    """
    optimizer = config.optimizer
    lr, reference = optimizer["lr"], optimizer.get("reference_batch")
    total = batch * accumulated * devices
    batches = f"batch {batch}"
    batches += f" x {accumulated} accumulated" if accumulated > 1 else ""
    batches += f" on {devices} device{'s' * (devices != 1)}"
    derivation = (config.automatic or {}).get(RATE)
    if derivation is not None:
        line = f"learning rate {lr:.3g} = {derivation} ({batches})"
    elif reference is None:
        line = f"learning rate {lr:.3g} for any batch ({batches}; no reference batch)"
    else:
        line = (
            f"learning rate {lr * total / reference:.3g} = {_format_value(lr)} x "
            f"{total}/{reference} ({batches}; reference batch {reference})"
        )
    return line + _describe_scales(optimizer)


def _describe_scales(optimizer: Mapping[str, Any]) -> str:
    """Return the end of that line: the options that scale rates of single parameters."""
    groups = any("lr_scale" in group for group in optimizer.get("groups") or ())
    options = {"optimizer.layer_decay": optimizer.get("layer_decay"), "optimizer.groups": groups}
    names = [name for name, value in options.items() if value]
    return f", scaled per parameter by {' and '.join(names)}" if names else ""


def comment_auto(text: str) -> str:
    """Add a comment to each option that is ``auto`` in a printed config."""
    names = "|".join(key.rpartition(".")[2] for key in KEYS)
    comment = "# by the number of training images: the head of the file in configs/data"
    return re.sub(rf"^( +(?:{names}): {AUTO})$", rf"\1 {comment}", text, flags=re.MULTILINE)


def _choose_batch(rule: ScheduleRule, images: int, devices: int) -> int:
    """Return the batch size per device."""
    total = next((batch for most, batch in rule.batches if images <= most), None)
    device_batch = rule.device_batch if total is None else min(rule.device_batch, total // devices)
    return max(1, min(device_batch, images // devices))


def _choose_scale(usual: Sequence[int], sizes: Sequence[tuple[int, int]]) -> Choice:
    """Return the longest and shortest edge: the usual ones, or less where images are small.

    Args:
        usual: Longest and shortest edge.
        sizes: Widths and heights of training images.
    """
    median = sorted(sizes, key=min)[len(sizes) // 2]
    shortest = min(usual[1], MOST_ENLARGED * min(median))
    scale = [round(usual[0] * shortest / usual[1]), shortest]
    factor = min(scale[0] / max(median), scale[1] / min(median))
    return scale, f"{factor:.2g} x the median image of {median[0]}x{median[1]}"


def _choose_rate(rule: ScheduleRule, images: int, total: int, start: str) -> Choice:
    """Return the rate for ``total`` images per step."""
    is_large = images > rule.large
    if start not in rule.rates or (is_large and start == BATCH_NORM):
        start = RANDOM
    top, batch = rule.rates[start]
    batch = rule.large_batch if is_large else batch
    counted = min(total, batch)
    rate = float(f"{top * math.sqrt(counted / batch):.3g}")
    return rate, f"{_format_value(top)} x sqrt({counted}/{batch}), {start}"


def _find_random_start(backbone: nn.Module) -> str:
    from torch.nn import GroupNorm, LayerNorm, RMSNorm
    from torch.nn.modules.batchnorm import _BatchNorm

    modules = list(backbone.modules())
    has_other_norms = any(isinstance(module, GroupNorm | LayerNorm | RMSNorm) for module in modules)
    batch_norms = any(isinstance(module, _BatchNorm) for module in modules)
    return BATCH_NORM if batch_norms and not has_other_norms else RANDOM


def _choose_schedule(
    rule: ScheduleRule, trainer: Mapping[str, Any], images: int, val_images: int, per_epoch: int
) -> dict[str, Choice]:
    """Return warm-up, milestones, length and validation interval, in epochs."""
    ideal_epochs = max(rule.seen / math.sqrt(images), rule.least_epochs(images))
    usual = max(1, round(min(ideal_epochs, MAX_EPOCHS)))
    steps, epochs = trainer["max_steps"], trainer["max_epochs"]
    reason = f"{images} training images"
    if epochs == AUTO:
        epochs, reason = (usual, reason) if steps < 0 else (-1, f"trainer.max_steps={steps}")
    lengths = [*([epochs] if epochs > 0 else []), *([steps / per_epoch] if steps > 0 else [])]
    length = min(lengths, default=usual)
    warmup = min(WARMUP_SHARE * length, rule.warmup_steps / per_epoch)
    interval = max(length / VALIDATIONS, TRAINED_PER_VALIDATED * val_images / images)
    if "val_check_interval" in trainer:
        interval = 1
    return {
        WARMUP: (round(warmup, 4), f"{warmup / length:.2g} of {length:.4g} epochs"),
        MILESTONES: ([round(drop * length, 4) for drop in DROPS], "8/12 and 11/12 of the length"),
        EPOCHS: (epochs, reason),
        INTERVAL: (max(1, math.ceil(interval)), f"{val_images} validation images"),
    }


def _format_value(value: Any) -> str:
    """Format a value as users type it, such as 1e-3."""
    if not isinstance(value, float) or not 0 < value < 0.01:
        return f"{value:g}" if isinstance(value, float) else str(value)
    digits, _, exponent = f"{value:.2e}".partition("e")
    return f"{float(digits):g}e{int(exponent)}"


def _get(config: RunConfig, key: str) -> Any:
    group, _, name = key.partition(".")
    return getattr(config, group).get(name)


def _stored_value(saved: Mapping[str, Any], key: str) -> Any:
    group, _, name = key.partition(".")
    return saved[group].get(name)


def _set(config: RunConfig, key: str, value: Any) -> None:
    group, _, name = key.partition(".")
    setattr(config, group, {**getattr(config, group), name: value})
