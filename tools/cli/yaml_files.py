"""Read YAML files fast; each command reads dozens of them at its start."""

from pathlib import Path
from typing import Any

import yaml

# The parser in C is eight times as fast; every wheel of PyYAML has it.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml(path: Path) -> Any:
    """Read a YAML file as plain values.

    Raises:
        OSError: The file cannot be read.
        UnicodeDecodeError: The file is not UTF-8.
        yaml.YAMLError: The file is not YAML.
    """
    return yaml.load(path.read_text(encoding="utf-8"), LOADER)
