"""Build a task from a config, and a trained one from its run folder."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from backbones import Backbone, create_backbone
from backbones.checkpoints.adoption import adopt, convert
from backbones.checkpoints.opening import Checkpoint, open_checkpoint
from backbones.options import check_arguments, check_complete, check_value
from backbones.options.schemas import validate
from tasks.engine.base import BUILT, BaseTask
from tasks.engine.classes import Classes, check_classes, classes_of, warn_of_order
from tasks.engine.instantiate import build
from tasks.engine.old_names import with_current_targets
from tasks.engine.optim import build_optimizer, learning_rate_factor
from tasks.engine.run_files import BuiltNetwork
from tasks.engine.saved_config import open_saved

# Tasks without a usual way to prepare an image.
DENSE = ("tasks.detection.task.DetectionTask", "tasks.segmentation.task.SegmentationTask")

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
    """Build the network of a config, with the weights that it starts from.

    A classifier that is kept comes with all of them, which ``build_task`` then loads.
    """
    options = config["backbone"]
    kept = config.get("keep_classifier") and options.get("pretrained")
    return create_backbone(**{**options, **({"pretrained": None} if kept else {})})


def build_task(config: Mapping[str, Any], data: Any, backbone: Backbone | None = None) -> BaseTask:
    """Build the task of a config around its network.

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
    """Open the weights and classifier that a run starts from, if any.

    Raises:
        ValueError: They lack a classifier that could be kept.
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
    return open_task(path).to(_device(device)).eval().requires_grad_(False)


def open_task(path: str | Path) -> BaseTask:
    """Build the task of a run folder or checkpoint, and load its weights.

    Raises:
        ValueError: The file does not say how its task was built.
    """
    found = open_saved(path)
    checkpoint = found.checkpoint
    classes = classes_of(checkpoint)
    saved = _config_in(checkpoint) if found.run is None else found.run.config
    if classes is None:
        raise ValueError(f"{checkpoint.path} does not name its classes; it is not of a run of ours")
    config = {**saved, "backbone": {**saved["backbone"], "pretrained": None}}
    # In this process: what a few images gain from others is less than these take to start.
    config["data"] = {**saved["data"], "num_workers": 0}
    check_options(config)
    data = build(config, "data", seed=0)
    serve_prediction(data, classes)
    task = build_task(config, data)
    task.load_weights(checkpoint)
    task.data = data
    return task


def _config_in(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the config that a checkpoint outside of run folders holds of its task."""
    saved = checkpoint.values.get(BUILT)
    groups = ("backbone", "head", "task", "optimizer", "schedule")
    if not isinstance(saved, Mapping) or not all(
        isinstance(saved.get(name), Mapping) for name in groups
    ):
        raise ValueError(
            f"{checkpoint.path} lies in no run folder and does not say how its task was built; "
            "pass a run folder, or call the task's load_from_checkpoint(path, model=...)"
        )
    try:
        validate(BuiltNetwork, dict(saved))
    except ValueError as error:
        raise ValueError(f"{checkpoint.path} is damaged: in config {error}") from None
    config: dict[str, Any] = with_current_targets(saved)
    if not isinstance(config.get("data"), Mapping):
        target = str(config["task"].get("_target_"))
        config["data"] = usual_data([target], config["backbone"].get("img_size"))
    return config


def usual_data(names: Collection[str], img_size: Any) -> dict[str, Any]:
    """Return the data config of a task that was trained without a datamodule.

    Args:
        names: The full names of its class and their bases, as far as they are known.
        img_size: Image size of its backbone.

    Raises:
        ValueError: The task needs a datamodule to prepare images.
    """
    dense = [name for name in DENSE if name in names]
    if dense:
        raise ValueError(
            f"a {dense[0].rpartition('.')[2]} that was trained without a datamodule does not know "
            "how to prepare images; set its attribute data to a datamodule of datamodules/"
        )
    side = img_size if isinstance(img_size, int) else max(img_size or (224,))
    return {
        "_target_": "datamodules.images.class_folders.ClassFoldersDataModule",
        "image_size": side,
    }


def serve_prediction(data: Any, classes: Classes) -> None:
    """Let a datamodule predict for a checkpoint's classes, without its data set."""
    data.predict_only(classes.names, classes.category_ids)


def _device(name: str | torch.device) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device={name!r} is not a device of torch; pass cpu or cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={name!r}, but torch sees no GPU here; leave device= out")
    return device
