"""Builds a task from a config, and a trained one from its run folder."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from backbones import Backbone, create_backbone
from backbones.checkpoints.adoption import adopt, convert
from backbones.checkpoints.opening import Checkpoint, open_checkpoint
from backbones.options import check_arguments, check_complete, check_value
from tasks.base import BaseTask
from tasks.classes import Classes, check_classes, classes_of, warn_of_order
from tasks.instantiate import build
from tasks.optim import build_optimizer, learning_rate_factor
from tasks.saved import saved_run

logger = logging.getLogger(__name__)


def check_options(config: Mapping[str, Any]) -> None:
    """Refuse options that no part of a task takes, before anything is built.

    Raises:
        ValueError: Names the option and the nearest one that there is.
    """
    for group, call in (
        ("backbone", create_backbone),
        ("optimizer", build_optimizer),
        ("schedule", learning_rate_factor),
    ):
        check_value(group, config.get(group), Mapping[str, Any])
        check_complete(call, config[group], group)
        check_arguments(call, config[group], group)


def build_backbone(config: Mapping[str, Any]) -> Backbone:
    """The network of a config, with the weights that it starts from.

    A classifier that is kept comes with all of them, which ``build_task`` then loads.
    """
    options = config["backbone"]
    kept = config.get("keep_classifier") and options.get("pretrained")
    return create_backbone(**{**options, **({"pretrained": None} if kept else {})})


def build_task(config: Mapping[str, Any], data: Any, backbone: Backbone | None = None) -> BaseTask:
    """The task of a config around its network.

    Args:
        config: Whole, as plain values, after ``check_options``.
        data: The datamodule, which knows its classes.
        backbone: From ``build_backbone``; without one it is built here.
    """
    start = _with_classifier(config) if config.get("keep_classifier") else None
    backbone = build_backbone(config) if backbone is None else backbone
    model = build(config, "head", backbone=backbone, num_classes=data.num_classes)
    if start is not None:
        check_classes(start.values, data.class_names, start.path, data.other_orders)
        adopt(model, convert(start, backbone))
        if start.class_names is None:
            warn_of_order(start.path, data.class_names, data.other_orders)
    task: BaseTask = build(
        config,
        "task",
        model=model,
        class_names=data.class_names,
        optimizer=config["optimizer"],
        schedule=config["schedule"],
    )
    task.category_ids = data.category_ids
    task.other_orders = data.other_orders
    return task


def _with_classifier(config: Mapping[str, Any]) -> Checkpoint | None:
    """The weights that a run starts from with their classifier; None where it starts from none.

    Raises:
        ValueError: They have none that could be kept.
    """
    file = config["backbone"].get("pretrained")
    if config["head"].get("_target_") != "heads.linear.LinearClassifier":
        raise ValueError("keep_classifier=true is for head=linear of classification and transfer")
    if file is True:
        raise ValueError(
            "keep_classifier=true, but backbone.pretrained=true fetches timm's weights without "
            "their classifier; pass backbone.pretrained=<run folder or file that has it>"
        )
    return open_checkpoint(file) if file else None


def load_run(path: str | Path, device: str | torch.device = "cpu") -> BaseTask:
    """See ``tasks.load``."""
    run = saved_run(path)
    if run is None:
        raise ValueError(
            f"{path} lies in no run folder, whose config.yaml says what to build; pass the folder "
            "that a training run left"
        )
    checkpoint = open_checkpoint(run.checkpoint)
    classes = classes_of(checkpoint)
    if classes is None:
        raise ValueError(f"{run.checkpoint} does not name its classes; it is none of a run of ours")
    config = {**run.config, "backbone": {**run.config["backbone"], "pretrained": None}}
    # In this process: what a few images gain from others is less than these take to start.
    config["data"] = {**run.config["data"], "num_workers": 0}
    check_options(config)
    data = build(config, "data", seed=0)
    serve_prediction(data, classes)
    task = build_task(config, data)
    task.load_weights(checkpoint)
    task.data = data
    return task.to(_device(device)).eval().requires_grad_(False)


def serve_prediction(data: Any, classes: Classes) -> None:
    """Let a datamodule predict for a checkpoint's classes, without its data set."""
    data.predict_only(classes.names, classes.category_ids)


def _device(name: str | torch.device) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device={name!r} is none of torch's; pass cpu or cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={name!r}, but torch sees no GPU here; leave device= out")
    return device
