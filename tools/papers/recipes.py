"""Recipes: values that depend on the backbone's host or the head, and the data they fit."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf

from backbones.options import mixer_names
from tools.cli.catalogue import catalogue
from tools.cli.paths import CONFIGS
from tools.cli.yaml_files import read_yaml

REQUIRED = "required"  # value of an option for label maps that the user must pass
NO_RECIPE = "none"  # replaces ``recipe=null``


def replace_null_recipe(overrides: Sequence[str]) -> list[str]:
    """Replace ``recipe=null`` by an empty recipe.

    Hydra accepts null for a group only if nothing else, such as an experiment, chooses the group.
    """
    return [
        re.sub(r"\bnull\b", NO_RECIPE, word) if re.match(r"\+*recipe=", word) else word
        for word in overrides
    ]


def register_resolvers() -> None:
    """Register the resolvers of configs: ``of_host``, ``of_head``, ``of_data`` and so on.

    ``${of_host:OPTION}`` and ``${of_head:OPTION}`` look up the host's or head's name in the table
    ``recipe.OPTION``, which maps patterns to values. ``${of_data:OPTION}`` looks up the name of the
    data set; a value ``{OTHER: table}`` is looked up by the option OTHER.
    ``${beside_token_mixer:OPTION}`` is the default of a host's class-token option with the typed
    token mixer.
    """
    OmegaConf.register_new_resolver("of_host", _host_value, replace=True)
    OmegaConf.register_new_resolver("of_head", _head_value, replace=True)
    OmegaConf.register_new_resolver("of_data", _data_value, replace=True)
    OmegaConf.register_new_resolver("beside_token_mixer", _prefix_option, replace=True)


def check_data(
    recipe: Mapping[str, Any], target: str, like: str | None = None, words: Sequence[str] = ()
) -> None:
    """Check that a recipe fits the data, unless an experiment chose the recipe.

    Args:
        recipe: The group of the config.
        target: The data module's class.
        like: The dataset whose recipes also fit these data.
        words: The command's options, for the advice.

    Raises:
        ValueError: The recipe is for other data.
    """
    data = recipe.get("_data_")
    if data is None or data == like:
        return
    file = read_yaml(CONFIGS / "data" / f"{data}.yaml")
    if file["data"]["_target_"] == target:
        return
    if typed_choice("experiment", words):
        return  # results are marked as not comparable with the paper
    choice = typed_choice("recipe", words) or "recipe="
    raise ValueError(
        f"this recipe is made for data={data}: pass data={data} data.root=<its folder>, "
        f"which may hold any set of the same layout, or leave {choice} out"
    )


def typed_choice(group: str, arguments: Sequence[str]) -> str | None:
    """Return the argument that chooses an option of a group, or None."""
    words = [re.sub(r"^\++|['\"]", "", word) for word in arguments]
    choices = [
        word
        for word in words
        if word.startswith(f"{group}=") and word not in (f"{group}=null", f"{group}={NO_RECIPE}")
    ]
    return choices[-1] if choices else None


def _host_value(option: str, *, _root_: Any) -> Any:
    return _look_up(_root_.recipe.get(option), catalogue().host_of(_root_.backbone.name), option)


def _head_value(option: str, *, _root_: Any) -> Any:
    return _look_up(_root_.recipe.get(option), _root_.head.name, option)


def _data_value(option: str, *, _root_: Any) -> Any:
    target = str(_root_.data._target_).rpartition(".")[2]
    name = target.removesuffix("DataModule").lower()
    value = _look_up(_root_.recipe.get(option), name, option)
    if not isinstance(value, Mapping):
        return value
    ((key, table),) = value.items()
    return _look_up(table, str(OmegaConf.select(_root_, key)), option)


def _prefix_option(option: str, *, _root_: Any) -> Any:
    options: Any = OmegaConf.to_container(_root_.backbone, resolve=False)
    names = [*mixer_names(options.get("token_mixer")), *mixer_names(options.get("mixer"))]
    return catalogue().prefix_options(_root_.backbone.name, *names)[option]


def _look_up(table: Mapping[str, Any] | None, name: str, option: str) -> Any:
    table = table or {}
    for pattern, value in table.items():
        if fnmatch.fnmatchcase(name, pattern):
            return value
    raise ValueError(
        f"this recipe gives {option} for {', '.join(table) or 'nothing'}, but not for {name}; "
        f"pass {option}=<value>"
    )
