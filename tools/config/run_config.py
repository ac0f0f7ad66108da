"""Compose a command's config; evaluations start from the run folder's config."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigNode, ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tasks.engine.saved_config import CONFIG, IDENTITY, SavedRun, identity, open_saved
from tools.cli.nested_config import flatten
from tools.cli.paths import CONFIGS
from tools.cli.processes import is_first_process
from tools.cli.yaml_files import read_yaml
from tools.config.recipes import replace_null_recipe

logger = logging.getLogger(__name__)

REMOVED = "removed"  # config key for the options that a sweep's command removes
EVALUATION = "evaluation"  # name under which Hydra finds a run folder's config
MODES = ("validate", "test", "predict")
# Taken from the run, so that its task can be built; unused in an evaluation.
RECIPE = ("optimizer", "schedule")
# Groups that a typed group also chooses.
CHOOSES = {"experiment": {"task", "backbone", "head", "data", "protocol"}, "protocol": {"head"}}
# Also taken from the run when evaluating other data: the order in which folders become labels.
CLASS_ORDER = "class_order"
# Only used by a training; the checkpoint has all weights.
TRAINING_ONLY = "backbone.pretrained"


def compose_config(overrides: Sequence[str]) -> DictConfig:
    """Compose the config of a run from the config files and a command's overrides."""
    return _compose("run", replace_null_recipe(overrides))


def compose_command(overrides: Sequence[str]) -> DictConfig:
    """Compose a command's config; with ``mode`` and ``ckpt``, from the run folder's config.

    Raises:
        ValueError: The folder is not a run folder, or its run has another task.
    """
    typed = OverridesParser.create().parse_overrides(list(overrides))
    run = _find_run(typed)
    return compose_config(overrides) if run is None else _compose_evaluation(run, typed)


def typed_text(override: Override) -> str:
    """Return an override as it was typed."""
    return str(override.input_line)


def is_evaluation(overrides: Sequence[str]) -> bool:
    """Return True if a mode is typed, so that the config may come from a run folder."""
    return any(override.lstrip("+").startswith("mode=") for override in overrides)


def job_config(overrides: Sequence[str], composed: DictConfig | None = None) -> dict[str, Any]:
    """Return the config of a job as plain values, with the typed options as ``overrides``."""
    config = compose_command(overrides) if composed is None else composed
    content: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    return content | {"overrides": strip_forced(overrides)}


def strip_forced(overrides: Sequence[str]) -> list[str]:
    """Remove the ``++`` of ``force_overrides``."""
    return [override.removeprefix("++") for override in overrides]


def restore_removals(overrides: Sequence[str]) -> list[str]:
    """Restore the removals that ``force_overrides`` has turned into values."""
    mark = f"++{REMOVED}."
    return [
        f"~{one.removeprefix(mark).partition('=')[0]}" if one.startswith(mark) else one
        for one in overrides
    ]


def force_overrides(
    arguments: Sequence[str], jobs: Sequence[Sequence[str]], *, varied: bool = False
) -> list[str]:
    """Rewrite arguments so that Hydra composes them with any initial groups.

    Hydra composes a command before our code runs, from the files alone. The options of a run
    folder's head, or of a swept experiment, may be missing there. So values get ``++``, which adds
    missing keys, and removals become values of ``REMOVED``. ``compose_checked`` has already checked
    that all keys exist in each job's config.

    Args:
        arguments: The command's arguments.
        jobs: The overrides of each run.
        varied: The sweep varies a group, such as experiments.

    Raises:
        ValueError: The command removes an option from a run folder's config.
    """
    parser = OverridesParser.create()
    runs = [_find_run(parser.parse_overrides(list(job))) for job in jobs]
    if not any(runs) and not varied:
        return list(arguments)
    taken = [argument for argument in arguments if argument.startswith("~")]
    if taken and any(runs):
        raise ValueError(f"{taken[0]} cannot be combined with a run folder; pass a value instead")
    tasks = {run.config["task_name"] for run in runs if run is not None}
    task = [] if len(tasks) > 1 or any(a.startswith("task=") for a in arguments) else tasks
    forced = [a if _is_choice(a) else _force(a) for a in arguments]
    return [*forced, *(f"task={name}" for name in task)]


def _force(argument: str) -> str:
    if argument.startswith("~"):
        return f"++{REMOVED}.{argument.removeprefix('~').partition('=')[0]}=true"
    return f"++{argument.lstrip('+')}"


def log_differences(config: Mapping[str, Any]) -> None:
    """Log in one line how an evaluation's config differs from its run's.

    A checkpoint outside of run folders lacks a config to compare with, which is logged instead.
    """
    if not is_first_process():
        return
    run = open_saved(config["ckpt"]).run
    if run is None:
        logger.info(
            f"{config['ckpt']} is not in a run folder (no ../{CONFIG}): task, backbone, head and "
            "data are the typed ones or the defaults"
        )
        return
    then, now = (
        flatten({group: part[group] for group in IDENTITY}) for part in (run.config, config)
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


def _compose(name: str, overrides: Sequence[str]) -> DictConfig:
    # This runs inside a job of Hydra's, but Hydra composes one config at a time.
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().hydra = None
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(CONFIGS)):
            return compose(name, overrides=list(overrides))
    finally:
        GlobalHydra.instance().hydra = outer


def _find_run(typed: Sequence[Override]) -> SavedRun | None:
    """Return the run folder that an evaluation names, or None."""
    values = {override.key_or_group: override.value() for override in typed}
    ckpt = values.get("ckpt")
    # The check of all commands rejects these combinations.
    if values.get("mode") not in MODES or values.get("resume") or not isinstance(ckpt, str):
        return None
    return open_saved(ckpt).run


def _is_choice(argument: str) -> bool:
    """Return True for flags, options of Hydra itself, and choices of a group."""
    key = argument.partition("=")[0].lstrip("+~")
    return key.startswith(("-", "hydra.", "hydra/")) or key in option_groups()


def option_groups() -> set[str]:
    """Return the names of Hydra's groups: config folders, and groups without files."""
    folders = {path.name for path in CONFIGS.iterdir() if path.is_dir()} - {"published"}
    return folders | {"backbone", "experiment"}


def _compose_evaluation(run: SavedRun, typed: Sequence[Override]) -> DictConfig:
    """Compose the run's config with the typed groups and values."""
    groups = option_groups()
    chosen = {o.key_or_group: typed_text(o) for o in typed if o.key_or_group in groups}
    values = [override for override in typed if override.key_or_group not in groups]
    given = {name for group in chosen for name in {group} | CHOOSES.get(group, set())}
    own = [f"{group}={name}" for group, name in _group_choices(run) if group not in given]
    now = _to_dict(compose_config([*own, *chosen.values()]))
    task = run.config["task_name"]
    if now["task_name"] != task:
        raise ValueError(
            f"{run.folder} is a run of task={task}; its weights fit no other task, so leave "
            f"task={now['task_name']} out"
        )
    merged = {**now, **{part: run.config[part] for part in RECIPE if part in run.config}}
    if now.get("paper") is None:
        merged["paper"] = run.config.get("paper")
    reference = {**now, **{group: run.config[group] for group in IDENTITY}}
    for group in IDENTITY:
        if identity(group, now[group]) == identity(group, run.config[group]):
            merged[group] = _follow_references(group, now, reference)
    # Other data is preprocessed like the data that the network was trained on.
    own_data, taken = run.config["data"], [*now["data"].get("_as_run_", ())]
    taken += [CLASS_ORDER] if CLASS_ORDER in now["data"] else []
    if merged["data"] is now["data"]:
        followed = {key: own_data[key] for key in taken if key in own_data}
        merged["data"] = {**merged["data"], **followed}
    new = {name for name in ("recipe", "experiment") if name in chosen}
    new -= {name for name in new if chosen[name] in run.config.get("overrides", ())}
    if new:
        others = [line for group, line in chosen.items() if group not in new]
        usual = [f"{group}={name}" for group, name in _group_choices(run) if group not in chosen]
        _add_changes(merged, _to_dict(compose_config([*usual, *others])), now)
    return _apply_values(merged, now, values)


def _group_choices(run: SavedRun) -> Iterator[tuple[str, str]]:
    """Yield the group choices that lead to a run's config, where config files have them."""
    config = run.config
    tasks = sorted(path.stem for path in (CONFIGS / "task").glob("*.yaml"))
    if config["task_name"] not in tasks:
        raise ValueError(
            f"{run.folder / CONFIG} has the unknown task {config['task_name']!r}; known: "
            f"{', '.join(tasks)}"
        )
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
        old, new = flatten(before[group]), flatten(now[group])
        config = OmegaConf.create(merged[group])
        for key, value in new.items():
            if old.get(key) != value:
                OmegaConf.update(config, key, value, force_add=True)
        merged[group] = _to_dict(config)


def _apply_values(
    merged: dict[str, Any], now: Mapping[str, Any], values: Sequence[Override]
) -> DictConfig:
    """Apply the typed values, by Hydra's rules, to a config that is in no file."""
    merged["backbone"] = {**merged["backbone"], "pretrained": None}
    known = OmegaConf.create(merged)
    lines = []
    for override in values:
        key, line = override.key_or_group, typed_text(override)
        # Options that are newer than the run may be typed, and options that the run had added.
        added = override.is_add() or (_has_key(now, key) and not _has_key(merged, key))
        lines.append(f"++{line.lstrip('+')}" if added else line)
    name = f"{EVALUATION}.yaml"
    ConfigStore.instance().repo[name] = ConfigNode(name, known, None, None, None)
    config = _compose(EVALUATION, lines)
    config.backbone.pretrained = None
    return config


def _has_key(config: Mapping[str, Any], key: str) -> bool:
    *parents, last = key.split(".")
    node: Any = config
    for parent in parents:
        node = node.get(parent) if isinstance(node, Mapping) else None
    return isinstance(node, Mapping) and last in node


def _to_dict(config: Any) -> dict[str, Any]:
    content: dict[str, Any] = OmegaConf.to_container(config, resolve=False)  # type: ignore[assignment]
    return content
