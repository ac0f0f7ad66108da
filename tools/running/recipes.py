"""What a recipe may depend on, the backbone's host and the head, and what it may be used for."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from tools.command_line.catalogue import catalogue
from tools.command_line.yaml_files import read_yaml

DATA = Path(__file__).resolve().parents[2] / "configs" / "data"


def register_resolvers() -> None:
    """Let recipes write ``${of_host:OPTION}`` and ``${of_head:OPTION}``.

    Either stands for a value of the table ``recipe.OPTION``, whose keys are patterns of names.
    """
    OmegaConf.register_new_resolver("of_host", _of_host, replace=True)
    OmegaConf.register_new_resolver("of_head", _of_head, replace=True)


def check_data(recipe: Mapping[str, Any], target: str, like: str | None = None) -> None:
    """Refuse a recipe that is made for other data.

    Args:
        recipe: The group of the config.
        target: The datamodule.
        like: The data whose recipes serve these, too.

    Raises:
        ValueError: Names the data that it is for.
    """
    wanted = recipe.get("_data_")
    if wanted is None or wanted == like:
        return
    file = read_yaml(DATA / f"{wanted}.yaml")
    if file["data"]["_target_"] != target:
        raise ValueError(
            f"this recipe is made for data={wanted}: pass data={wanted} data.root=<its folder>, "
            "which may hold any set of the same layout, or leave recipe= out"
        )


def _of_host(option: str, *, _root_: Any) -> Any:
    return _look_up(_root_.recipe.get(option), catalogue().host_of(_root_.backbone.name), option)


def _of_head(option: str, *, _root_: Any) -> Any:
    return _look_up(_root_.recipe.get(option), _root_.head.name, option)


def _look_up(table: Mapping[str, Any] | None, name: str, option: str) -> Any:
    table = table or {}
    for pattern, value in table.items():
        if fnmatch.fnmatchcase(name, pattern):
            return value
    raise ValueError(
        f"this recipe gives {option} for {', '.join(table) or 'nothing'} and not for {name}; "
        f"pass {option}=<value>"
    )
