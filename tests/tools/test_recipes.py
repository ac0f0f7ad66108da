"""The papers' recipes: what they say, for whom, and what they refuse."""

import fnmatch

import pytest
import yaml

from backbones import list_hosts
from tools.running.config import CONFIGS


@pytest.mark.parametrize("path", sorted((CONFIGS / "recipe").glob("*.yaml")), ids=lambda p: p.stem)
def test_recipes_give_values_only_for_what_exists(path):
    """Their tables go by patterns of hosts, or by heads or tasks."""
    names = list_hosts()
    names += [file.stem for group in ("head", "task") for file in (CONFIGS / group).glob("*.yaml")]
    tables = yaml.safe_load(path.read_text()).get("recipe", {})
    for option, table in tables.items():
        for pattern in table if isinstance(table, dict) else ():
            assert fnmatch.filter(names, pattern), f"{option}: nothing is called {pattern}"
