"""Hatchling's hook: a wheel has mixerlab.py as its package's ``__init__``."""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class WheelFiles(BuildHookInterface):  # type: ignore[misc]
    """Adds files under other names, which an editable installation would copy out of date."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Name the files of a standard wheel; `mixerlab doctor` reads the last two."""
        if version == "standard":
            build_data["force_include"] |= {
                "mixerlab.py": "mixerlab/__init__.py",
                "constraints.txt": "mixerlab/constraints.txt",
                "pyproject.toml": "mixerlab/pyproject.toml",
            }
