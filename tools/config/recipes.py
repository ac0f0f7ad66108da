"""What a recipe may depend on, the backbone's host and the head, and what it may be used for."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf

from tools.cli.catalogue import catalogue
from tools.cli.paths import CONFIGS
from tools.cli.yaml_files import read_yaml

NO_RECIPE = "none"  # what ``recipe=null`` stands for


def without_null(overrides: Sequence[str]) -> list[str]:
    """Overrides in which ``recipe=null`` names a recipe without settings, as Hydra wants it.

    Hydra takes null for a group only where nothing else, such as an experiment, chooses it.
    """
    return [
        re.sub(r"\bnull\b", NO_RECIPE, one) if re.match(r"\+*recipe=", one) else one
        for one in overrides
    ]


def register_resolvers() -> None:
    """Let recipes write ``${of_host:OPTION}`` and ``${of_head:OPTION}``.

    Either stands for a value of the table ``recipe.OPTION``, whose keys are patterns of names.
    ``${beside_token_mixer:OPTION}`` is the default of a host's option on class tokens.
    """
    OmegaConf.register_new_resolver("of_host", _of_host, replace=True)
    OmegaConf.register_new_resolver("of_head", _of_head, replace=True)
    OmegaConf.register_new_resolver("beside_token_mixer", _beside_token_mixer, replace=True)


def check_data(
    recipe: Mapping[str, Any], target: str, like: str | None = None, typed: Sequence[str] = ()
) -> None:
    """Refuse a recipe that is made for other data, unless an experiment brings it.

    Args:
        recipe: The group of the config.
        target: The datamodule.
        like: The data whose recipes serve these, too.
        typed: The command's options, which the advice goes by.

    Raises:
        ValueError: Names the data that it is for.
    """
    wanted = recipe.get("_data_")
    if wanted is None or wanted == like:
        return
    file = read_yaml(CONFIGS / "data" / f"{wanted}.yaml")
    if file["data"]["_target_"] == target:
        return
    if choice("experiment", typed):
        return  # the row's settings on other data, which is said where it is beside the paper
    chosen = choice("recipe", typed) or "recipe="
    raise ValueError(
        f"this recipe is made for data={wanted}: pass data={wanted} data.root=<its folder>, "
        f"which may hold any set of the same layout, or leave {chosen} out"
    )


def choice(group: str, typed: Sequence[str]) -> str | None:
    """Return the word that chooses an option of a group, if one is typed."""
    words = [re.sub(r"^\++|['\"]", "", word) for word in typed]
    chosen = [
        word
        for word in words
        if word.startswith(f"{group}=") and word not in (f"{group}=null", f"{group}={NO_RECIPE}")
    ]
    return chosen[-1] if chosen else None


def _of_host(option: str, *, _root_: Any) -> Any:
    return _look_up(_root_.recipe.get(option), catalogue().host_of(_root_.backbone.name), option)


def _of_head(option: str, *, _root_: Any) -> Any:
    return _look_up(_root_.recipe.get(option), _root_.head.name, option)


def _beside_token_mixer(option: str, *, _root_: Any) -> Any:
    typed = _root_.backbone.get("token_mixer")
    name = typed.get("name") if isinstance(typed, Mapping) else typed
    return catalogue().beside_token_mixer(_root_.backbone.name, name)[option]


def _look_up(table: Mapping[str, Any] | None, name: str, option: str) -> Any:
    table = table or {}
    for pattern, value in table.items():
        if fnmatch.fnmatchcase(name, pattern):
            return value
    raise ValueError(
        f"this recipe gives {option} for {', '.join(table) or 'nothing'} and not for {name}; "
        f"pass {option}=<value>"
    )
