"""Compose a command's config: groups from files or from a run folder, then the typed values."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from tasks.engine.family import find_family
from tasks.engine.run_folder.run_config import RunConfig
from tasks.engine.run_folder.saved_runs import (
    CONFIG,
    IDENTITY,
    SavedRun,
    identity,
    open_saved,
    read_config,
)
from tools.cli.grammar import apply, key_of, parse
from tools.cli.nested_config import flatten
from tools.cli.paths import CONFIGS
from tools.cli.processes import is_first_process
from tools.cli.yaml_files import read_yaml
from tools.papers.recipes import replace_null_recipe

logger = logging.getLogger(__name__)

MODES = ("validate", "test", "predict")
# Taken from the run, so that its task can be built; unused in an evaluation.
RECIPE = ("optimizer", "schedule")
# Groups that a typed group also chooses.
CHOOSES = {"experiment": {"task", "backbone", "head", "data", "protocol"}, "protocol": {"head"}}
# Groups that an evaluation takes from its run.
CHOICES = ("task", "backbone", "head", "data", "protocol")
# Also taken from the run when evaluating other data: the order in which folders become labels.
CLASS_ORDER = "class_order"
# Only used by a training; the checkpoint has all weights.
TRAINING_ONLY = "backbone.pretrained"


def compose_config(words: Sequence[str]) -> DictConfig:
    """Compose the config of a run from the config files and typed words."""
    config = _compose_groups([word for word in words if is_choice(word)])
    apply(config, [word for word in words if not is_choice(word)])
    return config


def compose_command(words: Sequence[str]) -> DictConfig:
    """Compose a command's config; with ``ckpt``, from the run folder's config.

    A training takes its task, network and head from there, and the typed data with their schedule.

    Raises:
        ValueError: The folder is not a run folder, or its run has another task.
    """
    values = [word for word in words if not is_choice(word)]
    options = {key_of(word): parse(word).value() for word in values if not word.startswith("~")}
    trains = options.get("mode", "fit") == "fit"
    run = _find_run(options, trains=trains)
    if run is None:
        return compose_config(words)
    choices = [word for word in words if is_choice(word)]
    config = OmegaConf.create(_compose_from_run(run, choices, trains=trains))
    apply(config, values)
    if trains:
        config.keep_head = True
    if not trains:
        config.backbone.pretrained = None
    elif not options.get("resume"):
        config.ckpt, config.backbone.pretrained = None, options["ckpt"]
    return config


def job_config(words: Sequence[str], composed: DictConfig | None = None) -> dict[str, Any]:
    """Return the config of a job as plain values, with the typed words as ``overrides``."""
    config = compose_command(words) if composed is None else composed
    content: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    return content | {"overrides": list(words)}


def is_choice(word: str) -> bool:
    """Return True for a word that chooses an option of a group."""
    return key_of(word) in option_groups()


@functools.cache
def option_groups() -> set[str]:
    """Return the names of Hydra's groups: config folders, and groups without files."""
    folders = {path.name for path in CONFIGS.iterdir() if path.is_dir()} - {"published", "plans"}
    return folders | {"backbone", "experiment"}


def log_differences(config: RunConfig) -> None:
    """Log in one line how an evaluation's config differs from its run's.

    A checkpoint outside of run folders lacks a config to compare with, which is logged instead.
    """
    if not is_first_process() or config.ckpt is None:
        return
    run = open_saved(config.ckpt).run
    if run is None:
        logger.info(
            f"{config.ckpt} is not in a run folder (no ../{CONFIG}): task, backbone, head and "
            "data are the typed ones or the defaults"
        )
        return
    then, now = (
        flatten({group: part[group] for group in IDENTITY}) for part in (run.config, config.plain())
    )
    differ = [
        f"{key} {_format_value(now, key)} (run: {_format_value(then, key)})"
        for key in [*now, *(key for key in then if key not in now)]
        if then.get(key) != now.get(key) and key != TRAINING_ONLY
    ]
    if differ:
        logger.info(f"differs from the run: {', '.join(differ)}")


def _format_value(values: Mapping[str, Any], key: str) -> str:
    value = values.get(key, "not set")
    return "null" if value is None else str(value)


def _compose_groups(choices: Sequence[str]) -> DictConfig:
    """Compose the config of chosen groups, and record all choices in it."""
    # This may run inside a job of Hydra's, but Hydra composes one config at a time.
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().hydra = None
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(CONFIGS)):
            words = replace_null_recipe([word.lstrip("+") for word in choices])
            config = compose("run", overrides=words, return_hydra_config=True)
    finally:
        GlobalHydra.instance().hydra = outer
    picks = config.hydra.runtime.choices
    groups = {group: picks[group] for group in sorted(option_groups()) if picks.get(group)}
    with open_dict(config):
        del config["hydra"]
        config["choices"] = groups
    return config


def _find_run(options: Mapping[str, Any], *, trains: bool) -> SavedRun | None:
    """Return the run folder that an evaluation names, or a training starts from, or None."""
    ckpt, resume = options.get("ckpt"), options.get("resume")
    # The check of all commands rejects other combinations.
    if not isinstance(ckpt, str) or not (trains or (options.get("mode") in MODES and not resume)):
        return None
    if trains and resume:
        return _find_trained_on(Path(ckpt).expanduser())
    run = open_saved(ckpt).run
    is_start = run is not None and find_family(run.config["task_name"]).keeps_head
    return run if is_start or not trains else None


def _find_trained_on(path: Path) -> SavedRun | None:
    """Return a run to resume that started from another run's network, or None for other runs."""
    folder = path if path.is_dir() else path.parent.parent
    config = read_config(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    return SavedRun(folder, path, config) if config.get("keep_head") else None


def _compose_from_run(run: SavedRun, choices: Sequence[str], *, trains: bool) -> dict[str, Any]:
    """Return the run's config with the typed groups.

    Args:
        run: The run.
        choices: Typed choices of groups.
        trains: True for a training, which has the schedule of its data and claims no paper's row.
    """
    words = {key_of(word): word for word in choices}
    overridden = {name for group in words for name in {group} | CHOOSES.get(group, set())}
    run_choices = run.config.get("choices") or dict(_earlier_choices(run))
    group_words = [
        f"{group}={run_choices[group]}"
        for group in CHOICES
        if group in run_choices and group not in overridden
    ]
    now = _to_dict(_compose_groups([*group_words, *words.values()]))
    task = run.config["task_name"]
    if now["task_name"] != task:
        raise ValueError(
            f"{run.folder} is a run of task={task}; its weights fit no other task, so leave "
            f"task={now['task_name']} out"
        )
    recipe = () if trains else RECIPE
    merged = {**now, **{part: run.config[part] for part in recipe if part in run.config}}
    if now.get("paper") is None and not trains:
        merged["paper"] = run.config.get("paper")
    reference = {**now, **{group: run.config[group] for group in IDENTITY}}
    for group in IDENTITY:
        if trains and group == "data" and "data" in words:
            continue
        if identity(group, now[group]) == identity(group, run.config[group]):
            merged[group] = _follow_references(group, now, reference)
    # Other data is preprocessed like the data that the network was trained on.
    own_data, inherited_keys = run.config["data"], [*now["data"].get("_as_run_", ())]
    inherited_keys += [CLASS_ORDER] if CLASS_ORDER in now["data"] else []
    if merged["data"] is now["data"]:
        followed = {key: own_data[key] for key in inherited_keys if key in own_data}
        merged["data"] = {**merged["data"], **followed}
    new_groups = {name for name in ("recipe", "experiment") if name in words}
    new_groups -= {name for name in new_groups if words[name] in run.config.get("overrides", ())}
    if new_groups:
        usual = [f"{group}={run_choices[group]}" for group in CHOICES if run_choices.get(group)]
        other_words = [word for group, word in words.items() if group not in new_groups]
        usual = [word for word in usual if key_of(word) not in words]
        _add_changes(merged, _to_dict(_compose_groups([*usual, *other_words])), now)
    return merged


def _earlier_choices(run: SavedRun) -> Iterator[tuple[str, str]]:
    """Yield the choices of a run of an older release, which did not store them."""
    config = run.config
    yield "task", config["task_name"]
    yield "backbone", config["backbone"]["name"]
    for group in ("head", "data"):
        for path in sorted((CONFIGS / group).glob("*.yaml")):
            content = read_yaml(path)
            if identity(group, content.get(group, content)) == identity(group, config[group]):
                yield group, path.stem
                break
    if (CONFIGS / "protocol" / f"{config.get('protocol')}.yaml").is_file():
        yield "protocol", config["protocol"]


def _follow_references(
    group: str, now: Mapping[str, Any], reference: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a group of the run, with references restored where they give the run's values.

    So ``backbone.img_size`` follows a typed ``data.image_size``, unless the run had set it.
    """
    config = OmegaConf.create({group: reference[group]})
    for key, value in flatten({group: now[group]}).items():
        if not isinstance(value, str) or "${" not in value:
            continue
        trial = OmegaConf.create(dict(reference))
        before = OmegaConf.select(trial, key)
        try:
            OmegaConf.update(trial, key, value)
            follows = before is not None and OmegaConf.select(trial, key) == before
        except (OmegaConfBaseException, ValueError):
            continue  # a recipe's table without an entry for this backbone
        if follows:
            OmegaConf.update(config, key, value)
    return _to_dict(config)[group]


def _add_changes(merged: dict[str, Any], before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Apply the changes of a newly typed recipe to the run's groups."""
    for group in IDENTITY:
        flat_before, flat_now = flatten(before[group]), flatten(now[group])
        config = OmegaConf.create(merged[group])
        for key, value in flat_now.items():
            if flat_before.get(key) != value:
                OmegaConf.update(config, key, value, force_add=True)
        merged[group] = _to_dict(config)


def _to_dict(config: Any) -> dict[str, Any]:
    content: dict[str, Any] = OmegaConf.to_container(config, resolve=False)  # type: ignore[assignment]
    return content
