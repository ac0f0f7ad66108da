"""Hydra groups without files: ``backbone`` from the registry, ``experiment`` from the papers."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hydra.core.config_store import ConfigNode, ConfigStore
from omegaconf import OmegaConf

from tools.cli.catalogue import catalogue
from tools.config.experiment_configs import experiment_config
from tools.config.recipes import NO_RECIPE, register_resolvers
from tools.papers.experiments import experiments


class LazyGroup(dict[str, ConfigNode | None]):
    """Hydra group that builds its configs on demand, a millisecond each.

    A launcher pickles it into another process; unpickling there registers all groups anew.

    Args:
        name: The group's name.
        options: Names of its options.
        content: Returns the content of an option's config file.
        package: Place of that content in the config; default: under the group's name.
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
        return _restore_group, (self.name,)

    def __getitem__(self, file: str) -> ConfigNode:
        config = super().__getitem__(file)
        if config is None:
            node = OmegaConf.create(dict(self.content(file.removesuffix(".yaml"))))
            config = ConfigNode(file, node, group=self.name, package=self.package, provider=None)
            self[file] = config
        return config


def register_groups() -> None:
    """Register the backbones and experiments as groups, and the resolvers of recipes."""
    warnings.filterwarnings("ignore", module=r"(torch|timm|mm\w+|lightning|torchmetrics)(\.|$)")
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it logs each retry
    # Hydra deep-copies this singleton, with all backbones in it, for every group that it lists.
    setattr(ConfigStore, "__deepcopy__", lambda self, memo: self)  # noqa: B010
    rows = experiments()
    known = catalogue()
    for group in (
        LazyGroup("backbone", known.list_backbones(), _backbone_config),
        LazyGroup("experiment", rows, lambda name: experiment_config(rows[name]), "_global_"),
    ):
        ConfigStore.instance().repo[group.name] = group
    ConfigStore.instance().store(NO_RECIPE, {}, "recipe", "_global_")
    register_resolvers()


def _backbone_config(name: str) -> dict[str, Any]:
    """Return a backbone's options; class-token options resolve after the token mixer is known."""
    known = catalogue()
    schema = known.schema(name)
    waiting = [key for key, value in known.prefix_options(name, None).items() if value]
    return schema | {key: f"${{beside_token_mixer:{key}}}" for key in waiting}


def _restore_group(name: str) -> LazyGroup:
    register_groups()
    group: LazyGroup = ConfigStore.instance().repo[name]
    return group
