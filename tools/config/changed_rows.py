"""Rows of papers with changes: other data or a shorter length than the row's, made to work.

Warm-up and cool-down are shortened in any run. A changed row is shown beside the paper and marked
as not comparable (``paper_figures.compared``).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf

from tools.cli.paths import CONFIGS
from tools.cli.processes import device_count, is_first_process
from tools.cli.yaml_files import read_yaml
from tools.config.automatic import fixed
from tools.config.run_config import compose_config
from tools.papers.experiments import experiments
from tools.papers.published import Row

say = logging.getLogger(__name__).info

REQUIRED = "required"  # a recipe's word for label maps that a command has to name
PARTS = ("warmup", "cooldown")  # of a schedule, in epochs
EXCLUSIVE = (("warmup_lr", "warmup_start"), ("min_lr", "min_lr_ratio"))
DEVICES = ("accelerator", "devices", "strategy", "precision", "sync_batchnorm")  # of a trainer
ENDS = ("warmup_lr", "min_lr")  # rates of a schedule as they are, which no batch scales


def adapt(config: dict[str, Any], like: str | None) -> None:
    """Let a row train on other data or for a shorter time than its own, with a line on each change.

    Any other run has its warm-up and cool-down shortened, too.

    Args:
        config: Of the run; changed in place.
        like: The data whose recipes serve the run's data, too.
    """
    paper = config.get("paper")
    name = paper.get("experiment") if isinstance(paper, Mapping) else None
    if config["mode"] != "fit":
        return
    row = experiments().get(str(name)) if name else None
    typed = config.get("overrides", ())
    if row is None:
        _say_each("", shorten(config, typed))
        return
    wanted = read_yaml(CONFIGS / "data" / f"{row.train.data}.yaml")["data"]["_target_"]
    lines: list[str] = []
    if config["data"]["_target_"] != wanted and like != row.train.data:
        lines = [*_fit_data(config, row, typed), *_one_device(config, row, typed)]
    lines += [*shorten(config, typed), *lower_ends(config, typed)]
    _say_each(f"experiment={row.name}: ", lines)


def _say_each(start: str, lines: Sequence[str]) -> None:
    if is_first_process():
        for line in lines:
            say(f"{start}{line}")


def keys_of(typed: Sequence[str]) -> set[str]:
    """The dotted names of typed options."""
    return {word.partition("=")[0].lstrip("+~") for word in typed}


def shorten(config: dict[str, Any], typed: Sequence[str]) -> list[str]:
    """Shorten warm-up and cool-down in proportion where a typed length leaves nothing else."""
    schedule, length = config["schedule"], config["trainer"]["max_epochs"]
    parts = {name: schedule.get(name) or 0 for name in PARTS}
    own = [name for name in PARTS if f"schedule.{name}" not in keys_of(typed) and parts[name]]
    numbers = all(isinstance(value, int | float) for value in (length, *parts.values()))
    if (
        "trainer.max_epochs" not in keys_of(typed)
        or not own
        or not numbers
        or not 0 < length <= sum(parts.values())
    ):
        return []
    rest = [word for word in typed if not word.lstrip("+").startswith("trainer.max_epochs=")]
    composed = compose_config([word for word in rest if not word.startswith("~")])
    usual: Any = OmegaConf.to_container(composed, resolve=True)
    epochs = fixed(usual)["trainer"]["max_epochs"] or 0
    if epochs <= length:
        return []
    share = length / epochs
    shorter = {name: round(parts[name] * share, 4) for name in own}
    config["schedule"] = schedule | shorter
    named = " and ".join(f"schedule.{name}={value}" for name, value in shorter.items())
    return [f"{named}, in proportion to trainer.max_epochs={length}"]


def lower_ends(config: dict[str, Any], typed: Sequence[str]) -> list[str]:
    """Lower the first and last rate with the top one where a small batch brings that below them."""
    optimizer, schedule, trainer = (config[name] for name in ("optimizer", "schedule", "trainer"))
    reference = optimizer.get("reference_batch")
    if not reference or not any(schedule.get(name) for name in ENDS):
        return []
    devices = device_count(trainer) * int(trainer["num_nodes"])
    share = config["data"]["batch_size"] * devices * trainer["accumulate_grad_batches"] / reference
    top = optimizer["lr"] * share
    lower = {
        name: schedule[name] * share
        for name in ENDS
        if (schedule.get(name) or 0) > top and f"schedule.{name}" not in keys_of(typed)
    }
    config["schedule"] = schedule | lower
    return [
        f"schedule.{name}={value:g}, in proportion to the rate for this batch"
        for name, value in lower.items()
    ]


def _fit_data(config: dict[str, Any], row: Row, typed: Sequence[str]) -> list[str]:
    """Leave out what the row says of its own data and the data of the run cannot follow."""
    lines: list[str] = []
    data = config["data"]
    file = _file_of(data)
    known = file.get("data", {})
    extra = [key for key in data if key not in known and f"data.{key}" not in keys_of(typed)]
    for key in extra if known else ():
        lines.append(f"data.{key}={data.pop(key)} is left out, which is of data={row.train.data}")
    usual = file.get("schedule", {})
    config["schedule"] = _without_usual(config["schedule"], usual, typed)
    if "augmentation" in data:
        data["augmentation"] = _fit_augmentation(data["augmentation"], typed)
    if data.get("token_labels") == REQUIRED:
        data["token_labels"] = None
        lines.append("data.token_labels=null, since the label maps are of the row's own images")
    if (
        row.train.start
        and config["backbone"]["pretrained"] is None
        and config["require_pretrained"]
    ):
        config["backbone"]["pretrained"] = False
        lines.append(
            "starts from random weights on other data than the row's; for trained ones pass "
            "backbone.pretrained=<run folder>"
        )
    return lines


def _fit_augmentation(augmentation: Mapping[str, Any], typed: Sequence[str]) -> dict[str, Any]:
    """Leave out options of another augmentation than the one that is in use."""
    from datamodules.images import transforms  # and with it torch

    made = getattr(transforms, str(augmentation["_target_"]).rpartition(".")[2], None)
    if made is None:
        return dict(augmentation)  # of a data set of the user's own
    known = {"_target_", *inspect.signature(made).parameters}
    return {
        key: value
        for key, value in augmentation.items()
        if key in known or f"data.augmentation.{key}" in keys_of(typed)
    }


def _one_device(config: dict[str, Any], row: Row, typed: Sequence[str]) -> list[str]:
    """Train on the device that there is, where the row would take all GPUs."""
    if "trainer" in keys_of(typed):
        return []
    usual = read_yaml(CONFIGS / "trainer" / "auto.yaml")
    own = {name: usual[name] for name in DEVICES if f"trainer.{name}" not in keys_of(typed)}
    if all(config["trainer"][name] == value for name, value in own.items()):
        return []
    config["trainer"] = config["trainer"] | own
    return [f"trainer=auto instead of {row.train.trainer}, so one device"]


def _without_usual(
    schedule: Mapping[str, Any], usual: Mapping[str, Any], typed: Sequence[str]
) -> dict[str, Any]:
    """Let the row's way to give a rate win over the data file's, where only one can be."""
    left = {
        name: None
        for pair in EXCLUSIVE
        for name in pair
        if all(schedule.get(one) is not None for one in pair)
        and float(usual.get(name, "nan")) == schedule[name]  # PyYAML reads 1e-6 as text
        and f"schedule.{name}" not in keys_of(typed)
    }
    return {**schedule, **left}


def _file_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """The content of the file of a data set; nothing where there is no such file."""
    for path in sorted((CONFIGS / "data").glob("*.yaml")):
        content: dict[str, Any] = read_yaml(path)
        if content["data"]["_target_"] == data["_target_"]:
            return content
    return {}
