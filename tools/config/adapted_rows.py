"""Adapt an experiment to other data or a shorter length than its row in the paper.

Warm-up and cool-down are shortened in any run. A changed row appears beside the paper's figures,
marked as not comparable (``paper_figures.compare_with_row``).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tasks.engine.devices import count_devices
from tasks.engine.optimisation.automatic import AUTO, find_rule
from tasks.engine.optimisation.schedule_rule import EPOCHS
from tasks.engine.run_folder.run_config import RunConfig
from tools.cli.grammar import key_of
from tools.cli.paths import CONFIGS
from tools.cli.processes import is_first_process
from tools.cli.yaml_files import read_yaml
from tools.config.run_config import compose_config
from tools.papers.recipes import REQUIRED

if TYPE_CHECKING:
    from tools.papers.published import Row

log = logging.getLogger(__name__).info

PHASES = ("warmup", "cooldown")  # of a schedule, in epochs
EXCLUSIVE = (("warmup_lr", "warmup_start"), ("min_lr", "min_lr_ratio"))
DEVICES = ("accelerator", "devices", "strategy", "precision", "sync_batchnorm")  # of a trainer
END_RATES = ("warmup_lr", "min_lr")  # absolute rates of a schedule, which the batch leaves unscaled


def adapt_row(config: RunConfig, like: str | None) -> None:
    """Adapt a row to the run's data and length, and log each change.

    Any other run only gets its warm-up and cool-down shortened.

    Args:
        config: The run's config; changed in place.
        like: The dataset whose recipes also fit the run's data.
    """
    paper = config.paper
    name = paper.get("experiment") if isinstance(paper, Mapping) else None
    if config.mode != "fit":
        return
    words, row = config.overrides, None
    if name:
        from tools.papers.experiments import experiments

        row = experiments().get(str(name))
    if row is None:
        _log_lines("", shorten_phases(config, words))
        return
    target = read_yaml(CONFIGS / "data" / f"{row.train.data}.yaml")["data"]["_target_"]
    lines: list[str] = []
    if config.data["_target_"] != target and like != row.train.data:
        lines = [*_fit_data(config, row, words), *_use_one_device(config, row, words)]
    lines += [*shorten_phases(config, words), *lower_ends(config, words)]
    _log_lines(f"experiment={row.name}: ", lines)


def _log_lines(start: str, lines: Sequence[str]) -> None:
    if is_first_process():
        for line in lines:
            log(f"{start}{line}")


def option_keys(words: Sequence[str]) -> set[str]:
    """Return the dotted names of typed options."""
    return {word.partition("=")[0].lstrip("+~") for word in words}


def shorten_phases(config: RunConfig, words: Sequence[str]) -> list[str]:
    """Shorten warm-up and cool-down in proportion if they exceed the typed length."""
    schedule, length = config.schedule, config.trainer["max_epochs"]
    parts = {name: schedule.get(name) or 0 for name in PHASES}
    names = [
        name for name in PHASES if f"schedule.{name}" not in option_keys(words) and parts[name]
    ]
    numbers = all(isinstance(value, int | float) for value in (length, *parts.values()))
    if (
        "trainer.max_epochs" not in option_keys(words)
        or not names
        or not numbers
        or not 0 < length <= sum(parts.values())
    ):
        return []
    rest = [word for word in words if key_of(word) != "trainer.max_epochs"]
    usual = compose_config([word for word in rest if not word.startswith("~")]).trainer.max_epochs
    epochs = find_rule(config.task_name).fixed[EPOCHS] if usual == AUTO else usual or 0
    if epochs <= length:
        return []
    share = length / epochs
    shorter = {name: round(parts[name] * share, 4) for name in names}
    config.schedule = schedule | shorter
    text = " and ".join(f"schedule.{name}={value}" for name, value in shorter.items())
    return [f"{text}, in proportion to trainer.max_epochs={length}"]


def lower_ends(config: RunConfig, words: Sequence[str]) -> list[str]:
    """Lower the first and last rate in proportion if a small batch puts the peak below them."""
    optimizer, schedule, trainer = config.optimizer, config.schedule, config.trainer
    reference = optimizer.get("reference_batch")
    if not reference or not any(schedule.get(name) for name in END_RATES):
        return []
    devices = count_devices(trainer) * int(trainer["num_nodes"])
    share = config.data["batch_size"] * devices * trainer["accumulate_grad_batches"] / reference
    top = optimizer["lr"] * share
    lower = {
        name: schedule[name] * share
        for name in END_RATES
        if (schedule.get(name) or 0) > top and f"schedule.{name}" not in option_keys(words)
    }
    config.schedule = schedule | lower
    return [
        f"schedule.{name}={value:g}, in proportion to the rate for this batch"
        for name, value in lower.items()
    ]


def _fit_data(config: RunConfig, row: Row, words: Sequence[str]) -> list[str]:
    """Drop settings of the row's own data that do not apply to the run's data."""
    lines: list[str] = []
    data = config.data
    file = _data_file(data)
    options = file.get("data", {})
    extra = [key for key in data if key not in options and f"data.{key}" not in option_keys(words)]
    for key in extra if options else ():
        lines.append(f"data.{key}={data.pop(key)} is left out: it belongs to data={row.train.data}")
    usual = file.get("schedule", {})
    config.schedule = _drop_default_rates(config.schedule, usual, words)
    if isinstance(data.get("augmentation"), Mapping):
        data["augmentation"] = _fit_augmentation(data["augmentation"], words)
    if data.get("token_labels") == REQUIRED:
        data["token_labels"] = None
        lines.append("data.token_labels=null, because the label maps belong to the row's images")
    if row.train.start and config.backbone["pretrained"] is None and config.require_pretrained:
        config.backbone["pretrained"] = False
        lines.append(
            "starts from random weights, because the data differs from the row's; for trained "
            "weights pass backbone.pretrained=<run folder>"
        )
    return lines


def _fit_augmentation(augmentation: Mapping[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """Drop options that the augmentation in use does not have."""
    from datamodules.images import transforms  # imports torch

    transform = getattr(transforms, str(augmentation["_target_"]).rpartition(".")[2], None)
    if transform is None:
        return dict(augmentation)  # of a user's own dataset
    names = {"_target_", *inspect.signature(transform).parameters}
    return {
        key: value
        for key, value in augmentation.items()
        if key in names or f"data.augmentation.{key}" in option_keys(words)
    }


def _use_one_device(config: RunConfig, row: Row, words: Sequence[str]) -> list[str]:
    """Use the default trainer with one device instead of the row's, which takes all GPUs."""
    if "trainer" in option_keys(words):
        return []
    usual = read_yaml(CONFIGS / "trainer" / "auto.yaml")
    devices = {name: usual[name] for name in DEVICES if f"trainer.{name}" not in option_keys(words)}
    if all(config.trainer[name] == value for name, value in devices.items()):
        return []
    config.trainer = config.trainer | devices
    return [f"trainer=auto instead of {row.train.trainer}, so one device"]


def _drop_default_rates(
    schedule: Mapping[str, Any], usual: Mapping[str, Any], words: Sequence[str]
) -> dict[str, Any]:
    """Let the row's way to give a rate replace the data file's where both are set."""
    dropped_rates = {
        name: None
        for pair in EXCLUSIVE
        for name in pair
        if all(schedule.get(rate) is not None for rate in pair)
        and float(usual.get(name, "nan")) == schedule[name]  # PyYAML reads 1e-6 as text
        and f"schedule.{name}" not in option_keys(words)
    }
    return {**schedule, **dropped_rates}


def _data_file(data: Mapping[str, Any]) -> dict[str, Any]:
    """Read the config file of a dataset; empty if the file is missing."""
    for path in sorted((CONFIGS / "data").glob("*.yaml")):
        content: dict[str, Any] = read_yaml(path)
        if content["data"]["_target_"] == data["_target_"]:
            return content
    return {}
