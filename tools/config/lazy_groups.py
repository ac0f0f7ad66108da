"""Hydra groups without files: ``backbone`` from the registry, ``experiment`` from the papers."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection, KeysView, Mapping
from typing import Any, Self

from hydra.core.config_store import ConfigNode, ConfigStore
from omegaconf import OmegaConf

from tools.cli.catalogue import catalogue
from tools.papers.recipes import NO_RECIPE, register_resolvers


class LazyGroup(dict[str, ConfigNode]):
    """Group of Hydra's that makes a config when it is looked up.

    All 950 backbones together would take 0.6 s. A launcher composes a sweep's runs in other
    processes; unpickling there registers the groups and resolvers anew.

    Args:
        name: Name of the group.
        names: Return the names of its options.
        content: Return what a config file of an option would hold.
        package: Where in the config the content goes; by default under the group's name.
    """

    def __init__(
        self,
        name: str,
        names: Callable[[], Collection[str]],
        content: Callable[[str], Mapping[str, Any]],
        package: str | None = None,
    ) -> None:
        super().__init__()
        self.name, self.names, self.content, self.package = name, names, content, package

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore_group, (self.name,)

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __contains__(self, file: object) -> bool:
        # Hydra looks up None if no option is chosen; that must not load the names.
        return file != "None.yaml" and str(file).removesuffix(".yaml") in self.names()

    def keys(self) -> KeysView[str]:  # type: ignore[override]
        """Return the options' file names."""
        return {f"{name}.yaml": None for name in self.names()}.keys()

    def __missing__(self, file: str) -> ConfigNode:
        node = OmegaConf.create(dict(self.content(file.removesuffix(".yaml"))))
        self[file] = ConfigNode(file, node, group=self.name, package=self.package, provider=None)
        return self[file]


def register_groups() -> None:
    """Register the backbones and experiments as groups, and the resolvers of recipes."""
    warnings.filterwarnings("ignore", module=r"(torch|timm|mm\w+|lightning|torchmetrics)(\.|$)")
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it logs each retry
    for group in (
        LazyGroup("backbone", lambda: catalogue().backbones, _backbone_config),
        LazyGroup("experiment", _experiment_names, _experiment_config, "_global_"),
    ):
        ConfigStore.instance().repo[group.name] = group
    ConfigStore.instance().store(NO_RECIPE, {}, "recipe", "_global_")
    register_resolvers()


def _backbone_config(name: str) -> dict[str, Any]:
    """Return a backbone's options; class-token options resolve after the token mixer is known."""
    registered = catalogue()
    schema = registered.schema(name)
    waiting = [key for key, value in registered.prefix_options(name).items() if value]
    return schema | {key: f"${{beside_token_mixer:{key}}}" for key in waiting}


def _experiment_names() -> Collection[str]:
    from tools.papers.experiments import experiments

    return experiments()


def _experiment_config(name: str) -> dict[str, Any]:
    from tools.papers.experiment_configs import experiment_config
    from tools.papers.experiments import experiments

    return experiment_config(experiments()[name])


def _restore_group(name: str) -> LazyGroup:
    register_groups()
    group: LazyGroup = ConfigStore.instance().repo[name]
    return group
