"""Hydra's groups without files: ``backbone`` from the registry, ``experiment`` from the papers."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hydra.core.config_store import ConfigNode, ConfigStore
from omegaconf import OmegaConf

from tools.cli.catalogue import catalogue
from tools.config.experiment_words import experiment_config
from tools.config.recipes import NO_RECIPE, register_resolvers
from tools.papers.experiments import experiments


class LazyGroup(dict[str, ConfigNode | None]):
    """A group of Hydra's, whose configs, a millisecond each, are made when asked for.

    A copy in another process, where a launcher has a sweep's run composed, is made there anew, and
    with it all else that composing needs.

    Args:
        name: Of the group.
        options: Names of its options.
        content: What a config file of an option would hold.
        package: Where in the config that stands; without one under the group's name.
    """

    def __init__(
        self,
        name: str,
        options: Iterable[str],
        content: Callable[[str], Mapping[str, Any]],
        package: str | None = None,
    ) -> None:
        super().__init__((f"{option}.yaml", None) for option in options)
        self.name, self.content, self.package = name, content, package

    def __reduce__(self) -> tuple[Any, ...]:
        return _registered, (self.name,)

    def __getitem__(self, file: str) -> ConfigNode:
        config = super().__getitem__(file)
        if config is None:
            node = OmegaConf.create(dict(self.content(file.removesuffix(".yaml"))))
            config = ConfigNode(file, node, group=self.name, package=self.package, provider=None)
            self[file] = config
        return config


def register() -> None:
    """Register the backbones and experiments as groups, and what configs may compute."""
    warnings.filterwarnings("ignore", module=r"(torch|timm|mm\w+|lightning|torchmetrics)(\.|$)")
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it tells of each retry
    # Hydra copies this singleton, with all the backbones in it, for every group that it lists.
    setattr(ConfigStore, "__deepcopy__", lambda self, memo: self)  # noqa: B010
    rows = experiments()
    known = catalogue()
    for group in (
        LazyGroup("backbone", known.list_backbones(), _backbone),
        LazyGroup("experiment", rows, lambda name: experiment_config(rows[name]), "_global_"),
    ):
        ConfigStore.instance().repo[group.name] = group
    ConfigStore.instance().store(NO_RECIPE, {}, "recipe", "_global_")
    register_resolvers()


def _backbone(name: str) -> dict[str, Any]:
    """The options of a backbone; those on class tokens wait for the token mixer that is typed."""
    known = catalogue()
    schema = known.schema(name)
    waiting = [key for key, value in known.beside_token_mixer(name, None).items() if value]
    return schema | {key: f"${{beside_token_mixer:{key}}}" for key in waiting}


def _registered(name: str) -> LazyGroup:
    register()
    group: LazyGroup = ConfigStore.instance().repo[name]
    return group
