"""Default task family of commands: the one in the defaults of configs/run.yaml."""

from __future__ import annotations

import functools
from pathlib import Path

from tasks.engine.family import Family, find_family
from tools.cli.yaml_files import read_yaml

RUN = Path(__file__).resolve().parents[2] / "configs" / "run.yaml"


@functools.cache
def usual_task() -> str:
    """Return the default of ``task=``."""
    groups = [entry for entry in read_yaml(RUN)["defaults"] if isinstance(entry, dict)]
    return str(next(entry["task"] for entry in groups if "task" in entry))


def usual_family() -> Family:
    """Return the default family."""
    return find_family(usual_task())
