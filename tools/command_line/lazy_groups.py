"""Hydra's groups without files: ``backbone`` from the registry, ``experiment`` from the papers."""

from __future__ import annotations

import logging
import warnings
from typing import Any

from hydra.core.config_store import ConfigNode, ConfigStore
from omegaconf import OmegaConf

from backbones import backbone_schema, list_backbones
from tools.command_line.experiments import experiment_nodes
from tools.running.recipes import register_resolvers


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
    """Register the backbones and experiments as groups, and what configs may compute."""
    warnings.filterwarnings("ignore", module=r"(torch|timm|mm\w+|lightning|torchmetrics)(\.|$)")
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it tells of each retry
    # Hydra copies this singleton, with all the backbones in it, for every group that it lists.
    setattr(ConfigStore, "__deepcopy__", lambda self, memo: self)  # noqa: B010
    group = BackboneGroup((f"{name}.yaml", None) for name in list_backbones())
    ConfigStore.instance().repo["backbone"] = group
    ConfigStore.instance().repo["experiment"] = experiment_nodes()
    register_resolvers()
    return group
