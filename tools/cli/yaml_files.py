"""Files of YAML, read as fast as can be: a command reads dozens of them before it begins."""

from pathlib import Path
from typing import Any

import yaml

# The parser in C, which every wheel of PyYAML has, takes an eighth of the time.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml(path: Path) -> Any:
    """What a file says, in plain values.

    Raises:
        OSError: It cannot be read.
        UnicodeDecodeError: It is not text.
        yaml.YAMLError: It is not YAML.
    """
    return yaml.load(path.read_text(encoding="utf-8"), LOADER)
