"""A start that networks of one host share, whatever their mixers: ``start=host``."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import seed_everything
from torch import nn

from backbones import Backbone
from backbones.analysis.description import host_options
from backbones.registry import look_up
from tasks.engine.base import BaseTask
from tasks.engine.instantiate import build
from tasks.engine.loading import build_backbone
from tasks.engine.run_folder.run_config import RunConfig


def start_as_host(config: RunConfig, datamodule: Any, task: BaseTask) -> list[str]:
    """Give the network what the plain host of this seed starts with, outside of unlike mixers.

    Random numbers begin anew after it, so that the training draws the same ones in each network.

    Args:
        config: The run's config.
        datamodule: Its data module, set up.
        task: The run's task, untrained.

    Returns:
        Names of the tensors that were set; none with ``start=own``.
    """
    if config.start == "own":
        return []
    seed_everything(config.seed, workers=True, verbose=False)
    model: Any = task.model
    name = look_up(model.backbone.name)[0].name
    options = host_options(config.backbone["name"], config.backbone) | {"name": name}
    options["pretrained"] = config.backbone["pretrained"]
    host = build_backbone(config.model_copy(update={"backbone": options}), datamodule)
    host_model = build(config.head, "head", backbone=host, **datamodule.head_arguments)
    unlike = tuple(f"backbone.{name}" for name in unlike_parts(model.backbone, host))
    host_state = host_model.state_dict()
    copied = []
    with torch.no_grad():
        for key, value in model.state_dict().items():
            host_value = host_state.get(key)
            if (
                host_value is not None
                and host_value.shape == value.shape
                and not key.startswith(unlike)
            ):
                value.copy_(host_value)
                copied.append(key)
    seed_everything(config.seed, workers=True, verbose=False)
    return copied


def unlike_parts(backbone: Backbone, host: Backbone) -> list[str]:
    """Return prefixes of the mixers that are built of other modules than the host's."""
    slots = {*backbone.token_mixers(), *backbone.channel_mixers()}
    names = slots | {prefix.removesuffix(".") for prefix in backbone.mixers()}
    return sorted(f"{n}." for n in names if _structure(backbone, n) != _structure(host, n))


def _structure(network: nn.Module, name: str) -> str:
    part = dict(network.named_modules()).get(name)
    return f"{type(part)} {part}"
