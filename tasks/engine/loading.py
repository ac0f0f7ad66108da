"""Build a task from a config, and a trained one from its run folder."""

from __future__ import annotations

import copy
import dataclasses
import logging
import subprocess
import sys
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from backbones import Backbone, create_backbone
from backbones.checkpoints.hub import is_model_source
from backbones.checkpoints.opening import TASK, Checkpoint, open_checkpoint
from backbones.options.schemas import validate
from tasks.engine.base import BaseTask
from tasks.engine.checkpoints.class_rows import (
    compare_classes,
    find_class_axes,
    with_classes,
)
from tasks.engine.checkpoints.entries import BUILT
from tasks.engine.classes import classes_of
from tasks.engine.family import family_of_task, imported
from tasks.engine.instantiate import build, check_options, check_target
from tasks.engine.run_folder.earlier_releases import with_current_targets, with_earlier_options
from tasks.engine.run_folder.run_config import RunConfig
from tasks.engine.run_folder.saved_runs import lasting_path, open_saved
from tasks.engine.run_folder.schemas import BuiltNetwork

logger = logging.getLogger(__name__)

GROUPS = ("backbone", "head", "task", "optimizer", "schedule", "data")
EXPORT = Path(__file__).resolve().parents[2] / "tools" / "export.py"  # a process of its own


def build_backbone(config: RunConfig, data: Any = None) -> Backbone:
    """Build the network of a config with its pretrained weights.

    With ``keep_classifier`` or ``keep_head`` the network stays untrained until ``build_task`` loads
    all weights.

    Args:
        config: Complete config as plain values.
        data: Datamodule, which sets the options that the backbone has and the data decide.
    """
    options = dict(config.backbone)
    decided = getattr(data, "backbone_arguments", {}) if data is not None else {}
    options |= {key: value for key, value in decided.items() if key in options}
    keeps_classifier = (config.keep_classifier or config.keep_head) and options.get("pretrained")
    with _adapters_of(options.get("lora")):
        return create_backbone(**{**options, **({"pretrained": None} if keeps_classifier else {})})


def _adapters_of(lora: Mapping[str, Any] | None) -> AbstractContextManager[None]:
    """Leave out the warning of adapters of random weights, which run.py refuses."""
    if lora is None:
        return nullcontext()
    from backbones.lora import weights_follow

    return weights_follow()


def build_task(config: RunConfig, data: Any, backbone: Backbone | None = None) -> BaseTask:
    """Build the task of a config around its network.

    Args:
        config: Complete config as plain values, after ``check_options``.
        data: Datamodule with the targets.
        backbone: From ``build_backbone``; by default it is built here.
    """
    keeps = bool(config.keep_classifier)
    if keeps:
        _check_kept(config)
    backbone = build_backbone(config, data) if backbone is None else backbone
    model = build(config.head, "head", backbone=backbone, **data.head_arguments)
    recipe = {"optimizer": config.optimizer, "schedule": config.schedule}
    task: BaseTask = build(config.task, "task", model=model, **data.task_arguments, **recipe)
    task.take_targets(data)
    file = config.backbone.get("pretrained")
    if keeps and not getattr(model, "keeps_classifier", False):
        raise ValueError("keep_classifier=true needs head=linear; leave it out")
    if keeps and file:
        task.load_weights(file, converted=True)
    if config.keep_head and file:
        _load_whole(task, config, data)
    return task


def _load_whole(task: BaseTask, config: RunConfig, data: Any) -> None:
    """Load backbone, neck and head of another run; log which classes it had as well.

    Raises:
        ValueError: The file lacks class names, or holds another network.
    """
    from backbones.checkpoints.adoption import adopt

    checkpoint = open_checkpoint(config.backbone["pretrained"])
    saved, names = classes_of(checkpoint), data.task_arguments["class_names"]
    if saved is None or not checkpoint.is_of_task:
        raise ValueError(
            f"{checkpoint.path} is not a checkpoint of this task with names of classes; pass it "
            "without keep_head=true, which loads its backbone alone"
        )
    axes = find_class_axes(task.model, _wider_model(config, data), len(names))
    tensors = {key.removeprefix(TASK): value for key, value in checkpoint.tensors.items()}
    tensors = with_classes(tensors, task.model, axes, saved.names, names)
    weights = {TASK + key: value for key, value in tensors.items()}
    adopt(task.model, dataclasses.replace(checkpoint, weights=weights))
    changes = compare_classes(saved.names, names)
    logger.info(f"Backbone, neck and head of {checkpoint.path}; classes: {changes}")


def _wider_model(config: RunConfig, data: Any) -> nn.Module:
    """Build the model of a config for one class more, without values."""
    arguments = {**data.head_arguments, "num_classes": data.head_arguments["num_classes"] + 1}
    head = {key: value for key, value in config.head.items() if key != "class_weights"}
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        model: nn.Module = build(head, "head", backbone=build_backbone(config, data), **arguments)
    return model


def _check_kept(config: RunConfig) -> None:
    """Refuse to keep a classifier that timm's weights lack.

    Raises:
        ValueError: ``backbone.pretrained=true``.
    """
    if config.backbone.get("pretrained") is True:
        raise ValueError(
            "keep_classifier=true, but backbone.pretrained=true fetches timm's weights without "
            "their classifier; pass backbone.pretrained=<run folder or file that has it>"
        )


def typed_config(saved: Mapping[str, Any]) -> RunConfig:
    """Return the config of a run of any release; options of its command stay out."""
    groups = ("task_name", "keep_classifier", *GROUPS)
    options = {name: copy.deepcopy(saved[name]) for name in groups if name in saved}
    return RunConfig(**{"task_name": "", **options})


def load_run(path: str | Path, device: str | torch.device = "cpu") -> BaseTask:
    """Load a trained network; see ``tasks.load``."""
    return open_task(path).to(_device(device)).eval().requires_grad_(False)


def open_task(path: str | Path) -> BaseTask:
    """Build the task of a run folder or checkpoint, and load its weights.

    Raises:
        ValueError: The file lacks the config of its task.
    """
    saved_model = open_saved(path)
    checkpoint = saved_model.checkpoint
    saved = _config_in(checkpoint) if saved_model.run is None else saved_model.run.config
    targets = read_targets(saved["task"], checkpoint)
    if targets is None:
        raise ValueError(
            f"{checkpoint.path} lacks class names, which all our runs save; pass one of our runs"
        )
    config = typed_config(saved)
    config.backbone["pretrained"] = None
    # For a few images, starting worker processes costs more than it saves.
    config.data["num_workers"] = 0
    config = check_options(config)
    data = build(config.data, "data", seed=0)
    data.predict_only(**targets)
    task = build_task(config, data)
    task.load_weights(checkpoint)
    task.data, task.source = data, Path(lasting_path(str(path)) if is_model_source(path) else path)
    return task


def export_task(task: BaseTask, to: str, options: Mapping[str, Any]) -> list[Path]:
    """Export the network of a task from ``tasks.load``; see ``BaseTask.export``.

    Raises:
        ValueError: The task lacks a run, or has other weights than its run.
    """
    if task.source is None:
        raise ValueError("export() takes a task from tasks.load(<run folder>)")
    saved = open_task(task.source).model.state_dict()
    for name, values in task.model.state_dict().items():
        if not torch.equal(values.cpu(), saved[name]):
            raise ValueError(
                f"{name} differs from {task.source}, which export() reads; train by tools/run.py, "
                "or save a checkpoint and load that"
            )
    words = [f"{key}={_as_word(value)}" for key, value in options.items() if value is not None]
    command = [sys.executable, str(EXPORT), f"to={to}", f"ckpt={task.source}", *words]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise ValueError((ended.stderr.splitlines() or [""])[-1].removeprefix("export.py: "))
    return [Path(line) for line in ended.stdout.splitlines()]


def _as_word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _config_in(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the task's config from a checkpoint outside run folders."""
    saved = checkpoint.values.get(BUILT)
    groups = ("backbone", "head", "task", "optimizer", "schedule")
    if not isinstance(saved, Mapping) or not all(
        isinstance(saved.get(name), Mapping) for name in groups
    ):
        raise ValueError(
            f"{checkpoint.path} lies outside a run folder and lacks the config of its task; "
            "pass a run folder, or call the task's load_from_checkpoint(path, model=...)"
        )
    try:
        validate(BuiltNetwork, dict(saved))
    except ValueError as error:
        raise ValueError(f"{checkpoint.path} is damaged: in config {error}") from None
    config = with_earlier_options(with_current_targets(saved))
    if not isinstance(config.get("data"), Mapping):
        target = check_target(config["task"], "task")
        config["data"] = usual_data([target], config["backbone"].get("img_size"))
    return config


def usual_data(names: Collection[str], img_size: Any) -> dict[str, Any]:
    """Return the data config of a task that was trained without a datamodule.

    Args:
        names: Dotted names of its class and known base classes.
        img_size: Image size of its backbone.

    Raises:
        ValueError: The task needs a datamodule to prepare images.
    """
    family = family_of_task(names)
    if family is None or family.usual_data is None:
        kind = (family.task if family else next(iter(names))).rpartition(".")[2]
        unit = family.unit if family else "inputs"
        raise ValueError(
            f"a {kind} that was trained without a datamodule cannot prepare {unit}; "
            "set its attribute data to a datamodule of datamodules/"
        )
    return family.usual_data(img_size)


def usual_datamodule(task: BaseTask) -> Any:
    """Build a datamodule for a task that was trained without one."""
    size = getattr(getattr(task.model, "backbone", None), "img_size", None)
    names = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(task).__mro__]
    data = build(usual_data(names, size), "data", seed=0)
    data.predict_only(**task.target_arguments())
    return data


def read_targets(task: Mapping[str, Any], checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Return the targets of a checkpoint as arguments of a datamodule's ``predict_only``.

    Args:
        task: The group ``task`` of its run's config.
        checkpoint: Checkpoint with or without targets.

    Returns:
        None if the file lacks them, like those of timm and of papers' authors.
    """
    kind: type[BaseTask] = imported(check_target(task, "task"))
    return kind.targets_of(checkpoint)


def task_from_file(kind: type[Any], path: str | Path, options: dict[str, Any]) -> Any:
    """Build a task of a kind from a checkpoint; see ``BaseTask.load_from_checkpoint``.

    Raises:
        ValueError: The file belongs to another task, or lacks the config of its task.
    """
    if options.pop("strict", None) is False:
        raise ValueError("strict=False is refused: a checkpoint has all weights of its task")
    options = {k: v for k, v in options.items() if k not in ("weights_only", "hparams_file")}
    if "model" in options:
        task = kind(**options)
        task.load_weights(path)
        return task
    result = open_task(path)
    if options:
        raise ValueError(
            f"{path} defines {', '.join(options)}; to change them, pass the model and all other "
            "arguments of the class"
        )
    if not isinstance(result, kind):
        raise ValueError(f"{path} belongs to a {type(result).__name__}, not to a {kind.__name__}")
    return result


def _device(name: str | torch.device) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device={name!r} is not a device of torch; pass cpu or cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={name!r}, but torch sees no GPU here; leave device= out")
    return device
