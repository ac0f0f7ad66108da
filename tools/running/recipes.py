"""What a recipe may depend on, the backbone's host and the head, and what it may be used for."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from tools.command_line.catalogue import catalogue
from tools.command_line.typed_network import label
from tools.command_line.yaml_files import read_yaml
from tools.comparing.experiments import find_experiment
from tools.comparing.row_names import UNTRAINED

DATA = Path(__file__).resolve().parents[2] / "configs" / "data"


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
    """Refuse a recipe that is made for other data.

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
    file = read_yaml(DATA / f"{wanted}.yaml")
    if file["data"]["_target_"] == target:
        return
    own = {group: choice(group, typed) for group in ("experiment", "recipe", "data")}
    if own["experiment"] and not own["recipe"]:
        raise ValueError(
            f"{own['experiment']} trains by a recipe that is made for data={wanted}: leave "
            f"{own['data'] or 'other data'} out and pass data.root=<its folder>, which may hold "
            f"any set of the same layout; for other data type {_network(own['experiment'])} in "
            f"place of {own['experiment']}"
        )
    raise ValueError(
        f"this recipe is made for data={wanted}: pass data={wanted} data.root=<its folder>, "
        f"which may hold any set of the same layout, or leave {own['recipe'] or 'recipe='} out"
    )


def choice(group: str, typed: Sequence[str]) -> str | None:
    """Return the word that chooses an option of a group, if one is typed."""
    words = [re.sub(r"^\++|['\"]", "", word) for word in typed]
    chosen = [word for word in words if word.startswith(f"{group}=") and word != f"{group}=null"]
    return chosen[-1] if chosen else None


def _network(experiment: str) -> str:
    """What an experiment trains, as it is typed without its name."""
    row = find_experiment(experiment.partition("=")[2])
    options = {key: value for key, value in row.options.items() if key not in UNTRAINED}
    head = [f"head={row.head}"] if row.head else []
    return " ".join([f"task={row.task}", f"backbone={label((row.backbone, options))}", *head])


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
