"""The task family of a command that names none: the one in the defaults of configs/run.yaml."""

from __future__ import annotations

import functools

from tasks.engine.family import Family, find_family
from tools.cli.paths import CONFIGS
from tools.cli.yaml_files import read_yaml


@functools.cache
def usual_task() -> str:
    """Return the name of ``task=`` where none is typed."""
    groups = [
        entry for entry in read_yaml(CONFIGS / "run.yaml")["defaults"] if isinstance(entry, dict)
    ]
    return str(next(entry["task"] for entry in groups if "task" in entry))


def usual_family() -> Family:
    """Return the family of commands that name no task."""
    return find_family(usual_task())
