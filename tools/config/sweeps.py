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
    found = []
    for argument in arguments:
        key, _, value = argument.partition("=")
        plain = not set(value) & set("()[]{}'\"")
        if key not in ("backbone", *GROUPS) or not plain or not set(value) & set(WILDCARDS):
            found.append(argument)
            continue
        if not sweep:
            raise ValueError(f"{argument} stands for several values; pass -m {argument}")
        if key == "backbone":  # patterns skip other modalities; names of one raise an error later
            typed = value.split(",")
            names = [name for name in select_backbones(value) if name in typed or fits(key, name)]
        else:
            names = _match(key, value, fits, arguments)
        found.append(f"{key}={','.join(names)}")
    return found


def _match(group: str, value: str, fits: Fits, arguments: Sequence[str]) -> list[str]:
    if group == "experiment":
        typed = {argument.partition("=")[0].lstrip("+") for argument in arguments}
        known = [
            name
            for name, row in experiments().items()
            if not row.train.cannot_run or typed & set(row.train.needs)
        ]
    else:
        known = sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))
    names = []
    for item in value.split(","):
        pattern = any(sign in item for sign in WILDCARDS)
        matching = [name for name in fnmatch.filter(known, item) if fits(group, name)]
        if pattern and not matching:
            all_names = "--help experiment lists all" if group == "experiment" else listed(known)
            raise ValueError(f"no {group} for this task matches {item!r}; known: {all_names}")
        names += matching if pattern else [item]
    return list(dict.fromkeys(names))
