"""Checks of a composed config that concern several parts, before anything is built."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from backbones.checkpoints.hub import is_model_source
from backbones.options import unknown
from backbones.options.schemas import validate
from tasks.engine.family import find_family
from tasks.engine.optimisation.automatic import apply_fixed_schedule, check_auto
from tasks.engine.run_folder.run_config import RunConfig
from tasks.engine.run_folder.saved_runs import SOLVED, checkpoint_file, lasting_path
from tools.cli.catalogue import catalogue
from tools.cli.network_names import config_network_name
from tools.cli.paths import CONFIGS
from tools.cli.yaml_files import read_yaml
from tools.config.adapted_rows import adapt_row
from tools.config.option_checks import check_all_options
from tools.config.training_length import fill_lengths
from tools.papers.recipes import REQUIRED, check_data, typed_choice

COLOURS = 3  # channels of images without data.bands
HALF_ZERO = 2**-25  # float16 rounds this and smaller values to 0
# Groups of every run.
GROUPS = ("backbone", "head", "data", "task", "trainer", "optimizer", "schedule")


def resolve_config(content: Mapping[str, Any]) -> RunConfig:
    """Check a composed config, and replace run folders by the checkpoint files they stand for.

    Raises:
        ValueError: Options contradict each other; the message shows a command that works.
    """
    content = dict(content)
    recipe = content.pop("recipe", {})
    for option in content.keys() - RunConfig.model_fields.keys():
        raise ValueError(unknown("option", option, RunConfig.model_fields))
    config = validate(RunConfig, content)
    _check_report(config)
    config.trainer = fill_lengths(config.trainer, training=config.mode == "fit")
    _check_host(config)
    _follow_bands(config)
    like = _check_compatible(config, recipe)
    if config.mode != "fit" or _is_published(config, recipe):
        config = apply_fixed_schedule(config)
    _check_mode(config)
    adapt_row(config, like)
    _check_solved(config)
    _check_length(config.trainer, config.mode)
    _check_compilation(config)
    if config.mode == "fit":
        check_auto(config)
        _check_precision(config.trainer, config.optimizer)
        check_warmup(config.schedule, config.trainer)
        _check_adapters(config)
        _check_pretrained(config)
    config = check_all_options(config)
    _resolve_paths(config)
    return config


def _check_host(config: RunConfig) -> None:
    """Check that the backbone has the modality of the task."""
    family, name, registered = find_family(config.task_name), config.backbone["name"], catalogue()
    family.check_host(name, registered.modality(name), registered.hosts_for(family.modality))


def _follow_bands(config: RunConfig) -> None:
    """Set the channels of the network to the number of ``data.bands``, if it is given.

    Raises:
        ValueError: Another number of channels was typed.
    """
    bands, backbone = config.data.get("bands"), config.backbone
    if "in_chans" not in backbone:
        return
    channels = COLOURS
    if bands is not None:
        channels = len(bands) if isinstance(bands, Sequence) else bands
    if backbone["in_chans"] not in (COLOURS, channels):
        raise ValueError(
            f"backbone.in_chans={backbone['in_chans']}, but the images have {channels} channels; "
            "leave it out and pass data.bands (with data=folder or data=segmentation_folder)"
        )
    backbone["in_chans"] = channels


def _check_compatible(config: RunConfig, recipe: Mapping[str, Any]) -> str | None:
    """Check that head, data and recipe fit the task and each other, and remove their marks.

    Returns:
        The dataset whose recipes also fit the run's data.
    """
    for group, options in (("head", config.head), ("data", config.data)):
        _check_task(group, options.pop("_tasks_", None), config.task_name)
    config.data.pop("_as_run_", None)
    if config.data.pop("_evaluates_only_", False) and config.mode == "fit":
        raise ValueError(
            "these data are for evaluation only; pass mode=test ckpt=<run folder or checkpoint "
            "file>, or leave ckpt= out for a backbone without weights, such as bicubic"
        )
    _check_task("recipe", recipe.get("_tasks_"), config.task_name)
    like: str | None = config.data.pop("_like_", None)
    check_data(recipe, config.data["_target_"], like, config.overrides)
    return like


def _resolve_paths(config: RunConfig) -> None:
    """Make paths absolute, as they are meant in the current folder."""
    data, backbone = config.data, config.backbone
    if isinstance(data.get("root"), str):
        # Evaluations of this run may start in another folder.
        data["root"] = str(Path(data["root"]).expanduser().absolute())
    if data.get("token_labels") not in (None, REQUIRED):
        data["token_labels"] = str(Path(data["token_labels"]).expanduser().absolute())
    if isinstance(backbone["pretrained"], str):
        # A resumed run no longer needs its pretrained weights.
        with contextlib.suppress(ValueError) if config.resume else contextlib.nullcontext():
            weights = backbone["pretrained"]
            file = lasting_path if is_model_source(weights) else checkpoint_file
            backbone["pretrained"] = str(file(weights))
    taught = config.task.get("distillation") or {}
    if config.mode == "fit" and isinstance(taught.get("checkpoint"), str):
        teacher = lasting_path(taught["checkpoint"])
        config.task = config.task | {"distillation": taught | {"checkpoint": teacher}}
    if config.mode != "fit" and config.ckpt is not None:
        config.ckpt = lasting_path(config.ckpt)


def _check_report(config: RunConfig) -> None:
    """Check that a report is only requested for a training."""
    if config.report and config.mode != "fit":
        raise ValueError(
            f"report=true needs mode=fit; for mode={config.mode} type python tools/analyse.py "
            "report ckpt=<run folder>"
        )


def _check_task(group: str, tasks: Sequence[str] | None, task: str) -> None:
    """Check that a head, dataset or recipe is meant for the task."""
    if tasks is None or task in tasks:
        return
    options = sorted((CONFIGS / group).glob("*.yaml"))
    choices = [f"{group}={path.stem}" for path in options if task in read_tasks(path, group)]
    raise ValueError(
        f"this {group} is for task={' or '.join(tasks)}; "
        f"task={task} takes {', '.join(choices) or 'none'}"
    )


def read_tasks(path: Path, group: str) -> Sequence[str]:
    """Return the tasks of a config file, or those of the files in its defaults."""
    content = read_yaml(path)
    tasks: Sequence[str] | None = content.get(group, content).get("_tasks_")
    if tasks is not None:
        return tasks
    parents = [name for name in content.get("defaults", ()) if name != "_self_"]
    return [task for name in parents for task in read_tasks(path.parent / f"{name}.yaml", group)]


def _check_mode(config: RunConfig) -> None:
    mode = config.mode
    if mode != "fit" and config.resume:
        raise ValueError(
            f"resume=true continues a training; for mode={mode} pass ckpt=<run folder> alone"
        )
    if mode == "fit" and config.ckpt is not None and not config.resume:
        raise ValueError(
            "ckpt with mode=fit is a run folder of detection or segmentation to train on from, or "
            "the run to resume: pass resume=true, or start a new run from its backbone with "
            f"backbone.pretrained={config.ckpt}"
        )
    if mode == "fit" and config.keep_head and not config.resume:
        _check_kept_head(config)
    if mode != "predict" and config.input is not None:
        raise ValueError("input= is for predictions: pass mode=predict")


def _check_kept_head(config: RunConfig) -> None:
    """Check that a training from a whole network has one, and nothing replaces its weights."""
    if not find_family(config.task_name).keeps_head:
        raise ValueError(
            f"keep_head=true is for detection and segmentation, not {config.task_name}"
        )
    if not isinstance(config.backbone["pretrained"], str):
        raise ValueError(
            "keep_head=true needs backbone.pretrained=<run folder or checkpoint of this task>; "
            "or pass ckpt=<run folder> alone, which names its network as well"
        )
    if config.start == "host":
        raise ValueError("keep_head=true starts from the weights of a run: leave start=host out")


def _check_solved(config: RunConfig) -> None:
    """Check that a protocol with solved classifiers, which saves no checkpoint, asks for none."""
    if not str(config.head.get("_target_")).startswith(SOLVED):
        return
    if config.mode != "fit":
        raise ValueError(
            f"protocol={config.protocol} solves its classifiers from the backbone's "
            f"features on each run: leave mode={config.mode} and ckpt out and pass "
            "backbone.pretrained=<run folder or checkpoint file>"
        )
    if config.resume:
        raise ValueError(
            f"protocol={config.protocol} saves no checkpoint to resume: start it again "
            "without resume=true"
        )


def _check_length(trainer: Mapping[str, Any], mode: str) -> None:
    for option in ("max_epochs", "max_steps"):
        if mode == "fit" and trainer[option] == 0:
            raise ValueError(
                f"trainer.{option}=0 leaves no training; for the metrics of a checkpoint pass "
                "mode=validate ckpt=<run folder or checkpoint file>"
            )


def _check_compilation(config: RunConfig) -> None:
    """Check that a run that is compiled has inputs of few sizes."""
    family = find_family(config.task_name)
    if config.trainer.get("compile") and not family.compiles:
        raise ValueError(
            f"trainer.compile=true compiles the network for each size of its inputs, and each "
            f"{family.modality.replace('_', ' ')} has its own: pass trainer.compile=false"
        )


def _check_precision(trainer: Mapping[str, Any], optimizer: Mapping[str, Any]) -> None:
    """Check AdamW's eps in float16: eps=0 makes weights without gradient NaN."""
    eps = optimizer.get("eps", 1e-8)  # torch's default
    if trainer["precision"] != "16-true" or optimizer.get("name") != "adamw":
        return
    if isinstance(eps, int | float) and eps <= HALF_ZERO:
        raise ValueError(
            f"trainer.precision=16-true trains in float16, where AdamW's eps={eps:g} rounds to 0 "
            "and the first step gives NaN; pass trainer.precision=16-mixed or bf16-true, or "
            "optimizer.eps=1e-4"
        )


def _is_published(config: RunConfig, recipe: Mapping[str, Any]) -> bool:
    """Return True for a recipe or an experiment, whose schedule is fixed."""
    words, paper = config.overrides, config.paper
    is_row = isinstance(paper, Mapping) and paper.get("experiment")
    return bool(recipe or typed_choice("recipe", words) or is_row)


def check_warmup(schedule: Mapping[str, Any], trainer: Mapping[str, Any]) -> None:
    """Check that warm-up and cool-down are shorter than the run.

    Raises:
        ValueError: They are as long as the run or longer.
    """
    epochs = trainer["max_epochs"]
    parts = {name: schedule.get(name) or 0 for name in ("warmup", "cooldown")}
    phases = {name: value for name, value in parts.items() if value}
    numbers = all(isinstance(value, int | float) for value in (*phases.values(), epochs))
    if numbers and phases and 0 < epochs <= sum(phases.values()):
        text = " and ".join(f"schedule.{name}={value}" for name, value in phases.items())
        raise ValueError(
            f"{text} epochs are the whole of trainer.max_epochs={epochs}; lower "
            f"{'them' if len(phases) > 1 else 'it'} (0 is off)"
        )


def _check_adapters(config: RunConfig) -> None:
    """Refuse low-rank adapters of random weights.

    Raises:
        ValueError: The run starts without trained weights.
    """
    backbone = config.backbone
    if backbone.get("lora") is not None and not (config.resume or backbone["pretrained"]):
        raise ValueError(
            "backbone.lora trains adapters of frozen weights, which would be random; pass "
            "backbone.pretrained=<run folder or file>, or true for timm's weights"
        )


def _check_pretrained(config: RunConfig) -> None:
    if not config.require_pretrained or config.resume:
        return
    if config.backbone["pretrained"] is not None:
        return
    if "backbone.pretrained=null" in config.overrides:
        return  # typed explicitly, which means false
    task, name, root = config.task_name, config.backbone["name"], config.output_dir
    start = find_family(task).started_by
    experiment = (config.paper or {}).get("experiment")
    if experiment is not None:
        from tools.papers.experiments import find_experiment

        raise ValueError(
            f"experiment={experiment} starts from trained weights. Train them:\n"
            f"  python tools/run.py {find_experiment(experiment).train.start}\n"
            "with data.root=<folder of the data>, then pass backbone.pretrained=<that run folder>; "
            "or pass backbone.pretrained=true for timm's weights, false for random ones"
        )
    raise ValueError(
        f"task={task} starts from a trained backbone. Train one:\n"
        f"  python tools/run.py task={start} backbone={name}\n"
        f"then pass it:\n"
        f"  python tools/run.py task={task} backbone={name} "
        f"backbone.pretrained={root}/{start}/{config_network_name(config.backbone)}/latest\n"
        "or pass backbone.pretrained=true for timm's weights, false for random ones"
    )
