"""What stands between a typed command and a run: backbones as options, and checks of all."""

from __future__ import annotations

import difflib
import itertools
import logging
import math
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from hydra.core.config_store import ConfigNode, ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from backbones import backbone_schema, list_backbones
from backbones.options import check_value, unknown
from backbones.registry import look_up
from tasks.saved import checkpoint_file
from tools.command_line.experiments import check_runs, experiment_nodes
from tools.comparing.experiments import find_experiment
from tools.running.config import CONFIGS, config_of, for_hydra, option_groups
from tools.running.processes import is_first_process
from tools.running.recipes import check_data, register_resolvers
from tools.running.sweeps import check_launcher, expanded

SWEEP = ("--multirun", "-m")
# Options at the top of the config and their types; those of the groups belong to what they build.
TOP = {
    "mode": Literal["fit", "validate", "test", "predict"],
    "ckpt": str | None,
    "resume": bool,
    "input": str | None,
    "seed": int,
    "output_dir": str,
    "checkpoint_every": float | None,
    "require_pretrained": bool,
}
# Other keys at the top.
PARTS = ("callbacks", "logger", "overrides", "paper", "protocol", "recipe", "task_name")
# What Hydra itself would do with folders, and have called.
OF_FOLDERS = ("hydra.run", "hydra.sweep.", "hydra.output_subdir", "hydra.job.chdir")
OF_CODE = ("hydra.callbacks", "hydra.searchpath", "hydra/callbacks", "hydra/sweeper")
HALF_ZERO = 2**-25  # and what is below it float16 rounds to 0
# Groups that every run has.
GROUPS = ("backbone", "head", "data", "task", "trainer", "optimizer", "schedule")


class BackboneGroup(dict[str, ConfigNode | None]):
    """Hydra's group ``backbone``, whose configs, two milliseconds each, are made when asked for.

    A copy in another process, where a launcher has a sweep's run composed, is made there anew, and
    with it all else that composing needs.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return register, ()

    def __getitem__(self, file: str) -> ConfigNode:
        config = super().__getitem__(file)
        if config is None:
            node = OmegaConf.create(dict(backbone_schema(file.removesuffix(".yaml"))))
            config = ConfigNode(file, node, group="backbone", package=None, provider=None)
            self[file] = config
        return config


def register() -> BackboneGroup:
    """Register what Hydra finds in no file, and what configs may compute.

    That is the group ``backbone``, from the registry, and ``experiment``, from configs/published.
    """
    warnings.filterwarnings("ignore", module=r"(torch|timm|mm\w+|lightning|torchmetrics)(\.|$)")
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it tells of each retry
    # Hydra copies this singleton, with all the backbones in it, for every group that it lists.
    ConfigStore.__deepcopy__ = lambda self, memo: self
    group = BackboneGroup.fromkeys(f"{name}.yaml" for name in list_backbones())
    ConfigStore.instance().repo["backbone"] = group
    ConfigStore.instance().repo["experiment"] = experiment_nodes()
    register_resolvers()
    return group


def prepare(arguments: Sequence[str]) -> list[str]:
    """Register the backbones and check the command before Hydra does.

    Returns:
        The command as Hydra is to have it: with the names that patterns stand for; see also
        ``run_config.for_hydra``.

    Raises:
        ValueError: A name or key that does not exist, with the nearest ones that do.
    """
    register()
    for argument in arguments:
        if any("\ud800" <= character <= "\udfff" for character in argument):
            raise ValueError(
                f"{os.fsencode(argument)!r} is no UTF-8 text, which neither config.yaml nor a log "
                "can hold; give the file or folder another name, or a link to it"
            )
    flags = [argument for argument in arguments if argument.startswith("-")]
    if any(flag not in SWEEP for flag in flags):
        return list(arguments)  # Hydra answers --cfg and its like itself
    check_launcher(arguments)
    _check_hydra(arguments)
    arguments = [one for argument in arguments for one in _whole(argument, arguments)]
    arguments = expanded(arguments, sweep=bool(flags), fits=_fitting(arguments))
    overrides = [a for a in arguments if not a.startswith(("-", "hydra.", "+hydra.", "hydra/"))]
    jobs = _jobs(overrides) if flags else [overrides]
    seedless = [tuple(one for one in job if not one.startswith("seed=")) for job in jobs]
    for job in dict.fromkeys(seedless) if flags else jobs:  # all seeds compose alike
        _check(job)
    return for_hydra(arguments, jobs)


def _check_hydra(arguments: Sequence[str]) -> None:
    """Refuse options of Hydra's that would name other folders, or programs to be called."""
    for argument in arguments:
        key = argument.partition("=")[0].lstrip("+~")
        # Lightning starts the other processes of a run with folders of Hydra's that it chose.
        if key.startswith(OF_FOLDERS) and is_first_process():
            raise ValueError(f"{argument} is refused: pass output_dir=<folder> for where runs go")
        if key.startswith("hydra") and (key.startswith(OF_CODE) or "_target_" in argument):
            raise ValueError(f"{argument} is refused: a command may not have other code called")


def _whole(argument: str, arguments: Sequence[str]) -> list[str]:
    """``head.options={...}`` in words by which Hydra takes keys that are not there yet.

    The part that gets them refuses those that it does not know. With a ``_target_`` nothing stays
    of what was there.
    """
    key, _, value = argument.partition("=")
    if "." not in key or not re.match(r"[A-Za-z_]", key) or not value.startswith("{"):
        return [argument]
    training = not any(a.lstrip("+").startswith("mode=") for a in arguments)
    if "_target_" in value and training:
        return [f"~{key}", f"+{argument}"]
    return [f"++{argument}"]


def swept(arguments: Sequence[str]) -> list[str]:
    """The keys of a sweep's command that have several values."""
    typed = [a for a in arguments if not a.startswith(("-", "hydra.", "+hydra.", "hydra/"))]
    parsed = OverridesParser.create().parse_overrides(typed)
    return [one.get_key_element().lstrip("+~") for one in parsed if one.is_sweep_override()]


def _fitting(arguments: Sequence[str]) -> Callable[[str, str], bool]:
    """Whether an option of a group is one of the task that is typed, or of the usual one."""
    typed = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    task = typed.get("task", "classification")

    def fits(group: str, name: str) -> bool:
        if group not in ("head", "data", "recipe") or set(task) & set(",*?["):
            return True
        tasks = _tasks_of(CONFIGS / group / f"{name}.yaml", group)
        return not tasks or task in tasks

    return fits


def varied(arguments: Sequence[str]) -> list[str]:
    """The same, but for those that the folders of the runs tell already; none without a sweep."""
    if not any(argument in SWEEP for argument in arguments):
        return []
    return [key for key in swept(arguments) if key not in ("task", "backbone", "ckpt")]


def resolved(config: Any) -> dict[str, Any]:
    """Check what no single part can, and fill in the checkpoint files that folders stand for.

    Raises:
        ValueError: An impossible combination, with the command that works.
    """
    config = dict(config)
    known = [*TOP, *GROUPS, *PARTS]
    for option in config:
        if option not in known:
            raise ValueError(unknown("option", option, known))
    for option, hint in TOP.items():
        check_value(option, config.get(option), hint)
    for group in (*GROUPS, "callbacks", "logger"):
        check_value(group, config.get(group), Mapping[str, Any])
    if not 0 <= config["seed"] < 2**32:
        raise ValueError(f"seed={config['seed']} is not from 0 to 4294967295")
    minutes = config["checkpoint_every"] or 0
    if not 0 <= minutes < math.inf:
        raise ValueError(f"checkpoint_every={minutes} is no number of minutes; 0 is none")
    for group in ("head", "data"):
        _check_fits(group, config[group].pop("_tasks_", None), config["task_name"])
    recipe = config.pop("recipe", {})
    _check_fits("recipe", recipe.get("_tasks_"), config["task_name"])
    check_data(recipe, config["data"]["_target_"])
    _check_mode(config)
    _check_length(config["trainer"], config["mode"])
    if config["mode"] == "fit":
        _check_precision(config["trainer"], config["optimizer"])
        _check_warmup(config["schedule"], config["trainer"])
    if config["backbone"]["pretrained"] is None and config["mode"] == "fit":
        _check_pretrained(config)
    _name_files(config)
    return config


def _name_files(config: dict[str, Any]) -> None:
    """Make paths what they mean now, in this folder."""
    data, backbone = config["data"], config["backbone"]
    if isinstance(data.get("root"), str):
        # Evaluations of this run may begin in another folder.
        data["root"] = str(Path(data["root"]).expanduser().absolute())
    if isinstance(backbone["pretrained"], str):
        backbone["pretrained"] = str(checkpoint_file(backbone["pretrained"]))
    if config["mode"] != "fit":
        # "latest" will lead elsewhere some day.
        config["ckpt"] = str(checkpoint_file(config["ckpt"]).resolve())


def _check_fits(group: str, tasks: Sequence[str] | None, task: str) -> None:
    """Refuse a head, dataset or recipe that says it is for other tasks."""
    if tasks is None or task in tasks:
        return
    options = sorted((CONFIGS / group).glob("*.yaml"))
    fitting = [f"{group}={path.stem}" for path in options if task in _tasks_of(path, group)]
    raise ValueError(
        f"this {group} is for task={' or '.join(tasks)}; "
        f"task={task} takes {', '.join(fitting) or 'none'}"
    )


def _tasks_of(path: Path, group: str) -> Sequence[str]:
    """The tasks that a file says it is for, or the file that it is made from."""
    content = yaml.safe_load(path.read_text())
    own: Sequence[str] | None = content.get(group, content).get("_tasks_")
    if own is not None:
        return own
    parents = [name for name in content.get("defaults", ()) if name != "_self_"]
    return [task for name in parents for task in _tasks_of(path.parent / f"{name}.yaml", group)]


def _check_mode(config: Mapping[str, Any]) -> None:
    mode = config["mode"]
    if mode != "fit" and config["ckpt"] is None:
        raise ValueError(
            f"mode={mode} needs the weights: pass ckpt=<run folder or checkpoint file>"
        )
    if mode != "fit" and config["resume"]:
        raise ValueError(
            f"resume=true goes on with training; with mode={mode} pass ckpt=<run folder> alone"
        )
    if mode == "fit" and config["ckpt"] is not None and not config["resume"]:
        raise ValueError(
            "ckpt with mode=fit is the run to go on with: pass resume=true, or start from its "
            f"backbone with backbone.pretrained={config['ckpt']}"
        )
    if mode != "predict" and config["input"] is not None:
        raise ValueError("input names images to predict: pass mode=predict")


def _check_length(trainer: Mapping[str, Any], mode: str) -> None:
    for option in ("max_epochs", "max_steps"):
        if mode == "fit" and trainer[option] == 0:
            raise ValueError(
                f"trainer.{option}=0 trains nothing; for the metrics of a checkpoint pass "
                "mode=validate ckpt=<run folder or checkpoint file>"
            )


def _check_precision(trainer: Mapping[str, Any], optimizer: Mapping[str, Any]) -> None:
    """Refuse AdamW in float16, where its eps is 0 and a weight without gradient becomes NaN."""
    eps = optimizer.get("eps", 1e-8)  # torch's default
    if trainer["precision"] != "16-true" or optimizer.get("name") != "adamw":
        return
    if isinstance(eps, int | float) and eps <= HALF_ZERO:
        raise ValueError(
            f"trainer.precision=16-true trains weights in float16, where AdamW's eps of {eps:g} is "
            "0 and the first step leaves NaN; pass trainer.precision=16-mixed or bf16-true, or "
            "+optimizer.eps=1e-4"
        )


def _check_warmup(schedule: Mapping[str, Any], trainer: Mapping[str, Any]) -> None:
    epochs = trainer["max_epochs"]
    parts = {name: schedule.get(name) or 0 for name in ("warmup", "cooldown")}
    given = {name: value for name, value in parts.items() if value}
    numbers = all(isinstance(value, int | float) for value in (*given.values(), epochs))
    if numbers and given and 0 < epochs <= sum(given.values()):
        named = " and ".join(f"schedule.{name}={value}" for name, value in given.items())
        raise ValueError(
            f"{named} epochs leave nothing of trainer.max_epochs={epochs}; lower "
            f"{'them' if len(given) > 1 else 'it'}, 0 being none"
        )


def _check_pretrained(config: Mapping[str, Any]) -> None:
    if not config["require_pretrained"] or config["resume"]:
        return
    task, name, root = config["task_name"], config["backbone"]["name"], config["output_dir"]
    experiment = (config.get("paper") or {}).get("experiment")
    if experiment is not None:
        raise ValueError(
            f"experiment={experiment} starts from trained weights. Train them:\n"
            f"  python tools/run.py {find_experiment(experiment).train.start}\n"
            "with data.root=<folder of the data>, then pass backbone.pretrained=<that run folder>; "
            "or pass backbone.pretrained=true for timm's weights, false for random ones"
        )
    raise ValueError(
        f"task={task} starts from a trained backbone. Train one:\n"
        f"  python tools/run.py task=classification backbone={name}\n"
        f"then pass it:\n"
        f"  python tools/run.py task={task} backbone={name} "
        f"backbone.pretrained={root}/classification/{name}/latest\n"
        "or pass backbone.pretrained=true for timm's weights, false for random ones"
    )


def _check(overrides: Sequence[str]) -> None:
    for override in overrides:
        _check_group(override)
        _check_removal(override)
    try:
        _check_names(overrides)
        config_of(overrides)
    except MissingConfigException as error:
        raise ValueError(_missing(error)) from None
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(_unknown_key(error, overrides)) from None
    except ValueError as error:
        if "group override" not in str(error):
            raise
        typed = OverridesParser.create().parse_overrides(list(overrides))
        wrong = [
            one.input_line
            for one in typed
            if "." not in one.key_or_group and not isinstance(one.value(), str | list)
        ]
        raise ValueError(f"{' or '.join(wrong)} is no name of an option; leave it out") from None


def _check_group(override: str) -> None:
    key, equals, value = override.partition("=")
    group = key.removeprefix("~")
    if key == "backbone.name":
        raise ValueError(f"{override} leaves another one's options; pass backbone={value}")
    if group in GROUPS and (group != key or (equals and value in ("", "null"))):
        raise ValueError(f"{override} is refused: a run needs its {group}")
    if key == "logger" and value in ("", "null"):
        raise ValueError(f"{override} is refused: logger=csv leaves metrics.csv alone")
    if group == "experiment" and re.fullmatch(r"\w+", value) and value != "null":
        check_runs(find_experiment(value))
    if group in GROUPS and value.startswith("["):
        raise ValueError(f"{override} names several; pass -m {group}={value.strip('[]')}")


def _check_names(overrides: Sequence[str]) -> None:
    """Refuse what has no key, and other things than names in a list of a group's options."""
    for one in OverridesParser.create().parse_overrides(list(overrides)):
        if not one.key_or_group:
            raise ValueError(f"{one.input_line} names no option; type key=value")
        group = one.key_or_group in option_groups()
        value = None if one.is_sweep_override() else one.value()
        if group and isinstance(value, list) and not all(isinstance(name, str) for name in value):
            raise ValueError(f"{one.input_line} is refused: {one.key_or_group} takes names")


def _check_removal(override: str) -> None:
    group = override.partition("=")[0].removeprefix("~")
    if override.startswith("~") and ("." not in group or group.startswith("trainer.")):
        raise ValueError(f"{override} is refused: a run needs its {group}; give a value instead")
    if override.startswith("~") and group.endswith(("._target_", ".name")):
        raise ValueError(f"{override} is refused: nothing else says what to build")


def _jobs(overrides: Sequence[str]) -> list[list[str]]:
    """The overrides of each run of a sweep, but for globs, which name what exists."""
    parts = []
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        if not override.is_sweep_override():
            parts.append([override.input_line])
        elif not isinstance(override.value(), Glob):
            key = override.get_key_element()
            parts.append([f"{key}={value}" for value in override.sweep_string_iterator()])
    return [list(job) for job in itertools.product(*parts)]


def _missing(error: MissingConfigException) -> str:
    group, _, name = str(error.missing_cfg_file).rpartition("/")
    if group == "backbone":  # its options are too many for a message
        return _refusal(name)
    if group == "experiment":
        try:
            find_experiment(name)
        except ValueError as refused:
            return str(refused)
    options = list(error.options or sorted(path.stem for path in (CONFIGS / group).glob("*.yaml")))
    near = difflib.get_close_matches(name, options, n=3)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return f"there is no {group} called {name!r}; {hint}known: {', '.join(options)}"


def _refusal(backbone: str) -> str:
    """What the registry says to a name that it does not know."""
    try:
        host, _ = look_up(backbone)
    except ValueError as refused:
        return str(refused)
    return f"{backbone} is {host.name} itself; pass backbone={host.name}"


def _unknown_key(error: Exception, overrides: Sequence[str]) -> str:
    """Hydra names the key that does not exist; the valid ones are in the config without it."""
    found = re.search(
        r"Could not (?:override|append to config, an item is already at) '([\w.@/]+)'", str(error)
    )
    if not isinstance(error, ConfigCompositionException) or found is None:
        return " ".join(str(error).split())
    key = found.group(1)
    # Which options exist depends on the chosen groups only.
    choices = [override for override in overrides if "." not in override.partition("=")[0]]
    try:
        node: Any = config_of([o for o in choices if not o.lstrip("+~").startswith(f"{key}=")])
    except (HydraException, OmegaConfBaseException):
        return " ".join(str(error).split())
    *parents, last = key.split(".")
    path = []
    for parent in parents:
        if not isinstance(node, DictConfig) or parent not in node:
            last = parent
            break
        node, path = node[parent], [*path, parent]
    known = [str(name) for name in node] if isinstance(node, DictConfig) else []
    known = sorted(name for name in known if not name.startswith("_"))
    near = difflib.get_close_matches(last, known, n=3)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    where = ".".join(path) or "the config"
    more = f". If its code takes more, +{key}=... adds it" if path else ""
    return f"{where} has no option {last!r}; {hint}it has: {', '.join(known)}{more}"
