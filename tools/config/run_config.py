"""The config of a command: of an evaluation the run folder's, with what is typed beside it."""

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
from tools.config.recipes import without_null

logger = logging.getLogger(__name__)

REMOVED = "removed"  # where Hydra keeps the options that a sweep's command takes away
EVALUATION = "evaluation"  # name under which Hydra finds the config of a run folder
MODES = ("validate", "test", "predict")
# Of the run as well, so that a task can be built; they change nothing in an evaluation.
RECIPE = ("optimizer", "schedule")
# What a typed group chooses besides itself.
CHOOSES = {"experiment": {"task", "backbone", "head", "data", "protocol"}, "protocol": {"head"}}
# Of the run's data also in an evaluation on other data: the order in which folders become labels.
FOLLOWED = "class_order"
# A run's start; the checkpoint has all weights.
NOT_OF_EVALUATION = "backbone.pretrained"


def compose_config(overrides: Sequence[str]) -> DictConfig:
    """The config of a run, from the files and a command's overrides."""
    return _compose("run", without_null(overrides))


def config_of(overrides: Sequence[str]) -> DictConfig:
    """The config that a command means: with ``mode`` and ``ckpt`` the one of a run folder.

    Raises:
        ValueError: The folder is no run folder, or one of another task.
    """
    typed = OverridesParser.create().parse_overrides(list(overrides))
    run = _run_of(typed)
    return compose_config(overrides) if run is None else _evaluation(run, typed)


def line_of(override: Override) -> str:
    """An override as it was typed."""
    return str(override.input_line)


def is_evaluation(overrides: Sequence[str]) -> bool:
    """Whether a mode is typed, so that the config may be one of a run folder."""
    return any(override.lstrip("+").startswith("mode=") for override in overrides)


def job_config(overrides: Sequence[str], composed: DictConfig | None = None) -> dict[str, Any]:
    """The config of a job as plain values, with what was typed as ``overrides``.

    Args:
        overrides: What was typed.
        composed: What it composes, if that is known.
    """
    config = config_of(overrides) if composed is None else composed
    content: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    return content | {"overrides": strip_pluses(overrides)}


def strip_pluses(overrides: Sequence[str]) -> list[str]:
    """Overrides of a job, the ``++`` of ``for_hydra`` taken off."""
    return [override.removeprefix("++") for override in overrides]


def restore_removals(overrides: Sequence[str]) -> list[str]:
    """Overrides of a job, in which ``for_hydra`` has put removals as values."""
    mark = f"++{REMOVED}."
    return [
        f"~{one.removeprefix(mark).partition('=')[0]}" if one.startswith(mark) else one
        for one in overrides
    ]


def for_hydra(
    arguments: Sequence[str], jobs: Sequence[Sequence[str]], *, varied: bool = False
) -> list[str]:
    """The arguments in a form that Hydra composes with whatever groups it begins with.

    Hydra composes a command before anything of ours runs, from the files alone. There the options
    of a run folder's head, or of an experiment that a sweep varies, may not exist. So values come
    with ``++``, which makes what does not exist, and removals as values of ``REMOVED``. That all
    exist in each job's config is checked before.

    Args:
        arguments: Of the command.
        jobs: The overrides of each run.
        varied: True for a sweep over a group, such as experiments.

    Raises:
        ValueError: An option is to be taken away from the config of a run folder.
    """
    parser = OverridesParser.create()
    runs = [_run_of(parser.parse_overrides(list(job))) for job in jobs]
    if not any(runs) and not varied:
        return list(arguments)
    taken = [argument for argument in arguments if argument.startswith("~")]
    if taken and any(runs):
        raise ValueError(f"{taken[0]} cannot be typed beside a run folder; give a value instead")
    tasks = {run.config["task_name"] for run in runs if run is not None}
    task = [] if len(tasks) > 1 or any(a.startswith("task=") for a in arguments) else tasks
    forced = [a if _is_choice(a) else _forced(a) for a in arguments]
    return [*forced, *(f"task={name}" for name in task)]


def _forced(argument: str) -> str:
    if argument.startswith("~"):
        return f"++{REMOVED}.{argument.removeprefix('~').partition('=')[0]}=true"
    return f"++{argument.lstrip('+')}"


def log_differences(config: Mapping[str, Any]) -> None:
    """Name in one line what an evaluation does otherwise than the run that it takes weights from.

    A checkpoint outside of a run folder has nothing to compare with, which is said instead.
    """
    if not is_first_process():
        return
    run = open_saved(config["ckpt"]).run
    if run is None:
        logger.info(
            f"{config['ckpt']} lies in no run folder (no ../{CONFIG}): task, backbone, head and "
            "data are the typed ones and the defaults"
        )
        return
    then, now = (
        flatten({group: part[group] for group in IDENTITY}) for part in (run.config, config)
    )
    differ = [
        f"{key} {_shown(now, key)} (run: {_shown(then, key)})"
        for key in [*now, *(key for key in then if key not in now)]
        if then.get(key) != now.get(key) and key != NOT_OF_EVALUATION
    ]
    if differ:
        logger.info(f"differs from the run: {', '.join(differ)}")


def _shown(values: Mapping[str, Any], key: str) -> str:
    value = values.get(key, "not set")
    return "null" if value is None else str(value)


def _compose(name: str, overrides: Sequence[str]) -> DictConfig:
    # Hydra runs the job that asks for this, and composes for one at a time.
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().hydra = None
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(CONFIGS)):
            return compose(name, overrides=list(overrides))
    finally:
        GlobalHydra.instance().hydra = outer


def _run_of(typed: Sequence[Override]) -> SavedRun | None:
    """The run folder that an evaluation names."""
    values = {override.key_or_group: override.value() for override in typed}
    ckpt = values.get("ckpt")
    # Together these are refused, in words, by the check of all commands.
    if values.get("mode") not in MODES or values.get("resume") or not isinstance(ckpt, str):
        return None
    return open_saved(ckpt).run


def _is_choice(argument: str) -> bool:
    """Whether an argument is a flag, Hydra's own, or chooses a group."""
    key = argument.partition("=")[0].lstrip("+~")
    return key.startswith(("-", "hydra.", "hydra/")) or key in option_groups()


def option_groups() -> set[str]:
    """Names of Hydra's groups: folders of configs, and those that are filled from elsewhere."""
    folders = {path.name for path in CONFIGS.iterdir() if path.is_dir()} - {"published"}
    return folders | {"backbone", "experiment"}


def _evaluation(run: SavedRun, typed: Sequence[Override]) -> DictConfig:
    """The run's config with the typed groups and values."""
    groups = option_groups()
    chosen = {o.key_or_group: line_of(o) for o in typed if o.key_or_group in groups}
    values = [override for override in typed if override.key_or_group not in groups]
    given = {name for group in chosen for name in {group} | CHOOSES.get(group, set())}
    own = [f"{group}={name}" for group, name in _choices(run) if group not in given]
    now = _plain(compose_config([*own, *chosen.values()]))
    task = run.config["task_name"]
    if now["task_name"] != task:
        raise ValueError(
            f"{run.folder} is a run of task={task}, and its weights serve no other; leave "
            f"task={now['task_name']} out"
        )
    merged = {**now, **{part: run.config[part] for part in RECIPE if part in run.config}}
    if now.get("paper") is None:
        merged["paper"] = run.config.get("paper")
    reference = {**now, **{group: run.config[group] for group in IDENTITY}}
    for group in IDENTITY:
        if identity(group, now[group]) == identity(group, run.config[group]):
            merged[group] = _followed(group, now, reference)
    # Images are prepared as the network was trained with them, whatever data it is tried on.
    own_data, taken = run.config["data"], [*now["data"].get("_as_run_", ())]
    taken += [FOLLOWED] if FOLLOWED in now["data"] else []
    if merged["data"] is now["data"]:
        followed = {key: own_data[key] for key in taken if key in own_data}
        merged["data"] = {**merged["data"], **followed}
    new = {name for name in ("recipe", "experiment") if name in chosen}
    new -= {name for name in new if chosen[name] in run.config.get("overrides", ())}
    if new:
        others = [line for group, line in chosen.items() if group not in new]
        usual = [f"{group}={name}" for group, name in _choices(run) if group not in chosen]
        _add_changes(merged, _plain(compose_config([*usual, *others])), now)
    return _with_values(merged, now, values)


def _choices(run: SavedRun) -> Iterator[tuple[str, str]]:
    """The options of Hydra's groups that lead to a run's config, as far as files have them."""
    config = run.config
    tasks = sorted(path.stem for path in (CONFIGS / "task").glob("*.yaml"))
    if config["task_name"] not in tasks:
        raise ValueError(
            f"{run.folder / CONFIG} is of the task {config['task_name']!r}; known: "
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


def _followed(group: str, now: Mapping[str, Any], reference: Mapping[str, Any]) -> dict[str, Any]:
    """A group of the run, with references where its values are what these lead to.

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
    return _plain(config)[group]


def _add_changes(merged: dict[str, Any], before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Let the run's groups have what a newly typed recipe changes."""
    for group in IDENTITY:
        old, new = flatten(before[group]), flatten(now[group])
        config = OmegaConf.create(merged[group])
        for key, value in new.items():
            if old.get(key) != value:
                OmegaConf.update(config, key, value, force_add=True)
        merged[group] = _plain(config)


def _with_values(
    merged: dict[str, Any], now: Mapping[str, Any], values: Sequence[Override]
) -> DictConfig:
    """The typed values, by Hydra's rules, on a config that is in no file."""
    merged["backbone"] = {**merged["backbone"], "pretrained": None}
    known = OmegaConf.create(merged)
    lines = []
    for override in values:
        key, line = override.key_or_group, line_of(override)
        # Options that came after the run may be typed, and those that the run had added.
        added = override.is_add() or (_has(now, key) and not _has(merged, key))
        lines.append(f"++{line.lstrip('+')}" if added else line)
    name = f"{EVALUATION}.yaml"
    ConfigStore.instance().repo[name] = ConfigNode(name, known, None, None, None)
    config = _compose(EVALUATION, lines)
    config.backbone.pretrained = None
    return config


def _has(config: Mapping[str, Any], key: str) -> bool:
    *parents, last = key.split(".")
    node: Any = config
    for parent in parents:
        node = node.get(parent) if isinstance(node, Mapping) else None
    return isinstance(node, Mapping) and last in node


def _plain(config: Any) -> dict[str, Any]:
    content: dict[str, Any] = OmegaConf.to_container(config, resolve=False)  # type: ignore[assignment]
    return content
