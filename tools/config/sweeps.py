"""Sweeps: patterns of names as values, runs in other processes, and the table at the end."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence

from backbones.options import listed
from tools.cli.arguments import select
from tools.cli.paths import CONFIGS
from tools.papers.experiments import experiments

GROUPS = ("task", "head", "data", "trainer", "recipe", "experiment", "protocol")
SIGNS = "*?"

Fits = Callable[[str, str], bool]


def expanded(arguments: Sequence[str], *, sweep: bool, fits: Fits) -> list[str]:
    """A command in which patterns, such as ``backbone=swin_t*``, are the names they stand for.

    Args:
        arguments: As they were typed.
        sweep: Whether several values are allowed.
        fits: Whether an option of a group fits the command's task.

    Raises:
        ValueError: A pattern of nothing, or one where a single name has to be.
    """
    found = []
    for argument in arguments:
        key, _, value = argument.partition("=")
        plain = not set(value) & set("()[]{}'\"")
        if key not in ("backbone", *GROUPS) or not plain or not set(value) & set(SIGNS):
            found.append(argument)
            continue
        if not sweep:
            raise ValueError(f"{argument} names several; pass -m {argument}")
        names = select(value) if key == "backbone" else _options(key, value, fits, arguments)
        found.append(f"{key}={','.join(names)}")
    return found


def _options(group: str, value: str, fits: Fits, arguments: Sequence[str]) -> list[str]:
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
        pattern = any(sign in item for sign in SIGNS)
        matching = [name for name in fnmatch.filter(known, item) if fits(group, name)]
        if pattern and not matching:
            all_names = "--help experiment lists all" if group == "experiment" else listed(known)
            raise ValueError(f"no {group} for this task matches {item!r}; known: {all_names}")
        names += matching if pattern else [item]
    return list(dict.fromkeys(names))
