"""What no single part of a run can check of its config, before anything is built."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from backbones.options import check_value, unknown
from tasks.engine.saved_config import SOLVED, checkpoint_file
from tools.cli.network_names import name_of
from tools.cli.paths import CONFIGS
from tools.cli.ranges import check_ranges
from tools.cli.yaml_files import read_yaml
from tools.config.automatic import CHOSEN, check_auto, fixed
from tools.config.changed_rows import adapt
from tools.config.lengths import with_numbers
from tools.config.recipes import check_data, choice
from tools.papers.experiments import find_experiment

# Options at the top of the config and their types; those of the groups belong to what they build.
TOP = {
    "mode": Literal["fit", "validate", "test", "predict"],
    "ckpt": str | None,
    "resume": bool,
    "input": str | None,
    "seed": int,
    "output_dir": str,
    "checkpoints": Literal["all", "best", "last"],
    "checkpoint_every": float | None,
    "require_pretrained": bool,
    "keep_classifier": bool,
    "keep_memory": bool,
    "report": bool,
}
# Other keys at the top.
PARTS = (CHOSEN, "callbacks", "logger", "overrides", "paper", "protocol", "recipe", "task_name")
REQUIRED = "required"  # a recipe's word for label maps that a command has to name
HALF_ZERO = 2**-25  # and what is below it float16 rounds to 0
# Groups that every run has.
GROUPS = ("backbone", "head", "data", "task", "trainer", "optimizer", "schedule")


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
    check_ranges({key: config.get(key) for key in (*TOP, *GROUPS, "callbacks", "logger")})
    if not 0 <= config["seed"] < 2**32:
        raise ValueError(f"seed={config['seed']} is not from 0 to 4294967295")
    _check_report(config)
    minutes = config["checkpoint_every"] or 0
    if not 0 <= minutes < math.inf:
        raise ValueError(f"checkpoint_every={minutes} is no number of minutes; 0 is none")
    config["trainer"] = with_numbers(config["trainer"], training=config["mode"] == "fit")
    recipe, like = _check_made_for(config)
    if config["mode"] != "fit" or _is_published(config, recipe):
        config = fixed(config)
    _check_mode(config)
    adapt(config, like)
    _check_solved(config)
    _check_length(config["trainer"], config["mode"])
    if config["mode"] == "fit":
        check_auto(config)
        _check_precision(config["trainer"], config["optimizer"])
        check_warmup(config["schedule"], config["trainer"])
    if config["backbone"]["pretrained"] is None and config["mode"] == "fit":
        _check_pretrained(config)
    _name_files(config)
    return config


def _check_made_for(config: dict[str, Any]) -> tuple[Mapping[str, Any], str | None]:
    """Refuse a head, data or recipe made for others, and take out the marks that say so.

    Returns:
        The recipe, and the data whose recipes serve the run's data, too.
    """
    for group in ("head", "data"):
        _check_fits(group, config[group].pop("_tasks_", None), config["task_name"])
    config["data"].pop("_as_run_", None)
    recipe: Mapping[str, Any] = config.pop("recipe", {})
    _check_fits("recipe", recipe.get("_tasks_"), config["task_name"])
    like: str | None = config["data"].pop("_like_", None)
    check_data(recipe, config["data"]["_target_"], like, config.get("overrides", ()))
    return recipe, like


def _name_files(config: dict[str, Any]) -> None:
    """Make paths what they mean now, in this folder."""
    data, backbone = config["data"], config["backbone"]
    if isinstance(data.get("root"), str):
        # Evaluations of this run may begin in another folder.
        data["root"] = str(Path(data["root"]).expanduser().absolute())
    if data.get("token_labels") not in (None, REQUIRED):
        data["token_labels"] = str(Path(data["token_labels"]).expanduser().absolute())
    if isinstance(backbone["pretrained"], str):
        # A resumed run needs it no more.
        with contextlib.suppress(ValueError) if config["resume"] else contextlib.nullcontext():
            backbone["pretrained"] = str(checkpoint_file(backbone["pretrained"]))
    taught = config["task"].get("distillation") or {}
    if config["mode"] == "fit" and isinstance(taught.get("checkpoint"), str):
        teacher = str(checkpoint_file(taught["checkpoint"]).resolve())
        config["task"] = config["task"] | {"distillation": taught | {"checkpoint": teacher}}
    if config["mode"] != "fit":
        # "latest" will lead elsewhere some day.
        config["ckpt"] = str(checkpoint_file(config["ckpt"]).resolve())


def _check_report(config: Mapping[str, Any]) -> None:
    """Refuse the page of a run where no run is trained."""
    if config["report"] and config["mode"] != "fit":
        raise ValueError(
            f"report=true is of a training; with mode={config['mode']} type python "
            "tools/analyse.py report ckpt=<run folder>"
        )


def _check_fits(group: str, tasks: Sequence[str] | None, task: str) -> None:
    """Refuse a head, dataset or recipe that says it is for other tasks."""
    if tasks is None or task in tasks:
        return
    options = sorted((CONFIGS / group).glob("*.yaml"))
    fitting = [f"{group}={path.stem}" for path in options if task in tasks_of(path, group)]
    raise ValueError(
        f"this {group} is for task={' or '.join(tasks)}; "
        f"task={task} takes {', '.join(fitting) or 'none'}"
    )


def tasks_of(path: Path, group: str) -> Sequence[str]:
    """The tasks that a file of a group says it is for, or the files that it is made from."""
    content = read_yaml(path)
    own: Sequence[str] | None = content.get(group, content).get("_tasks_")
    if own is not None:
        return own
    parents = [name for name in content.get("defaults", ()) if name != "_self_"]
    return [task for name in parents for task in tasks_of(path.parent / f"{name}.yaml", group)]


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


def _check_solved(config: Mapping[str, Any]) -> None:
    """Refuse what needs a checkpoint where classifiers are solved, which leaves none."""
    if not str(config["head"].get("_target_")).startswith(SOLVED):
        return
    if config["mode"] != "fit":
        raise ValueError(
            f"protocol={config.get('protocol')} solves its classifiers anew from the features of "
            f"a backbone: leave mode={config['mode']} and ckpt out and pass "
            "backbone.pretrained=<run folder or checkpoint file>"
        )
    if config["resume"]:
        raise ValueError(
            f"protocol={config.get('protocol')} leaves nothing to resume: start it anew without "
            "resume=true"
        )


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


def _is_published(config: Mapping[str, Any], recipe: Mapping[str, Any]) -> bool:
    """Return True for a recipe or an experiment, whose schedule does not depend on the set."""
    typed, paper = config.get("overrides", ()), config.get("paper")
    is_row = isinstance(paper, Mapping) and paper.get("experiment")
    return bool(recipe or choice("recipe", typed) or is_row)


def check_warmup(schedule: Mapping[str, Any], trainer: Mapping[str, Any]) -> None:
    """Refuse a warm-up and cooldown that are as long as the run.

    Raises:
        ValueError: Names both lengths.
    """
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
    if "backbone.pretrained=null" in config.get("overrides", ()):
        return  # typed, as false is
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
        f"backbone.pretrained={root}/classification/{name_of(config['backbone'])}/latest\n"
        "or pass backbone.pretrained=true for timm's weights, false for random ones"
    )
