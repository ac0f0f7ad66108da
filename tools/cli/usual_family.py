"""Task family of a network that is typed without ``task=``."""

from __future__ import annotations

import functools

from tasks.engine.family import Family, families, find_family
from tools.cli.catalogue import catalogue
from tools.cli.paths import CONFIGS
from tools.cli.yaml_files import read_yaml


@functools.cache
def usual_task() -> str:
    """Return the default of ``task=`` in configs/run.yaml."""
    defaults = read_yaml(CONFIGS / "run.yaml")["defaults"]
    groups = [entry for entry in defaults if isinstance(entry, dict)]
    return str(next(entry["task"] for entry in groups if "task" in entry))


def family_of_backbone(name: str) -> Family:
    """Return the default family if it takes the backbone's modality, else the first that does.

    Raises:
        ValueError: The name is unknown, or every task rejects its modality.
    """
    modality = catalogue().modality(name)
    for family in (find_family(usual_task()), *families().values()):
        if family.modality == modality:
            return family
    raise ValueError(f"{name} is a backbone for {modality}s, which every task here rejects")
