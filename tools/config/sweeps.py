"""Patterns of names as values of a sweep."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence

from backbones.options import listed
from tasks.engine.family import families
from tools.cli.arguments import select_backbones
from tools.cli.catalogue import catalogue
from tools.cli.paths import CONFIGS
from tools.cli.usual_family import usual_task
from tools.config.config_checks import read_tasks
from tools.papers.experiments import experiments

GROUPS = ("task", "head", "data", "trainer", "recipe", "experiment", "protocol")
WILDCARDS = "*?"

Fits = Callable[[str, str], bool]


def expand_patterns(arguments: Sequence[str], *, sweep: bool) -> list[str]:
    """Replace patterns, such as ``backbone=swin_t*``, by the names that they match.

    Args:
        arguments: As typed.
        sweep: True if several values are allowed.

    Raises:
        ValueError: A pattern matches no name, or the command takes a single name.
    """
    words, fits = [], _task_filter(arguments)
    for argument in arguments:
        key, _, value = argument.partition("=")
        is_plain = not set(value) & set("()[]{}'\"")
        if key not in ("backbone", *GROUPS) or not is_plain or not set(value) & set(WILDCARDS):
            words.append(argument)
            continue
        if not sweep:
            raise ValueError(f"{argument} stands for several values; pass -m {argument}")
        if key == "backbone":  # patterns skip other modalities; names of one raise an error later
            items = value.split(",")
            names = [name for name in select_backbones(value) if name in items or fits(key, name)]
        else:
            names = _match(key, value, fits, arguments)
        words.append(f"{key}={','.join(names)}")
    return words


def _match(group: str, value: str, fits: Fits, arguments: Sequence[str]) -> list[str]:
    if group == "experiment":
        keys = {argument.partition("=")[0].lstrip("+") for argument in arguments}
        options = [
            name
            for name, row in experiments().items()
            if not row.train.cannot_run or keys & set(row.train.needs)
        ]
    else:
        options = sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))
    names = []
    for item in value.split(","):
        pattern = any(sign in item for sign in WILDCARDS)
        matching = [name for name in fnmatch.filter(options, item) if fits(group, name)]
        if pattern and not matching:
            all_names = "--help experiment lists all" if group == "experiment" else listed(options)
            raise ValueError(f"no {group} for this task matches {item!r}; known: {all_names}")
        names += matching if pattern else [item]
    return list(dict.fromkeys(names))


def _task_filter(arguments: Sequence[str]) -> Fits:
    """Return a filter for the options of a group that fit the typed or default task."""
    values = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    task = values.get("task", usual_task())

    def fits(group: str, name: str) -> bool:
        if group == "backbone":
            family = families().get(task)
            return family is None or catalogue().modality(name) == family.modality
        if group not in ("head", "data", "recipe") or set(task) & set(",*?["):
            return True
        tasks = read_tasks(CONFIGS / group / f"{name}.yaml", group)
        return not tasks or task in tasks

    return fits
