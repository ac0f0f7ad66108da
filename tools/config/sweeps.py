"""Patterns of names as values of a sweep."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence

from backbones.options import listed
from tools.cli.arguments import select_backbones
from tools.cli.paths import CONFIGS
from tools.papers.experiments import experiments

GROUPS = ("task", "head", "data", "trainer", "recipe", "experiment", "protocol")
WILDCARDS = "*?"

Fits = Callable[[str, str], bool]


def expand_patterns(arguments: Sequence[str], *, sweep: bool, fits: Fits) -> list[str]:
    """Replace patterns, such as ``backbone=swin_t*``, by the names that they match.

    Args:
        arguments: As typed.
        sweep: True if several values are allowed.
        fits: Returns True if an option of a group fits the command's task.

    Raises:
        ValueError: A pattern matches no name, or the command takes a single name.
    """
    words = []
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
