"""Reference of the configuration: every group of configs/ with its files."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import yaml
from markup import code, prose, table

from tools.cli.paths import CONFIGS
from tools.config.help import list_groups

CONFIGURATION = """# Configuration

A run is configured by Hydra. `configs/run.yaml` lists the groups, each group is a folder, and each
file of a group is one choice. Values on the command line override all files. The group `backbone`
has no files: the registry fills it, see [Hosts](hosts/index.md) and [Mixers](mixers/index.md).

`python tools/run.py --help config task=detection` prints every value of a run.

## configs/run.yaml

"""
HEADS = """# Heads

A head turns feature maps into losses and predictions. [Heads](../howto/heads.md) says how to choose
one and how to add one. Each section shows the file with every option.
"""
RECIPES = """# Recipes

`recipe=NAME` sets what a host's authors trained with. [The papers' recipes](../howto/recipes.md)
compares them. The comment at the head of a file states the source of its values, the head that the
authors used, and what is unknown.
"""
DATA = """# Data layouts

`data=NAME data.root=FOLDER` reads a data set in the layout below.
[Real data](../howto/real_data.md) explains checks, formats and order of classes.
[Own data](../tutorials/own_data/index.md) covers exports of annotation tools.
Each section shows the file with every option.
"""
ELSEWHERE = ("head", "recipe", "data")


def pages() -> dict[str, str]:
    """Return the pages."""
    groups = [group for group in list_groups() if group not in ELSEWHERE]
    links = [
        f"* `{group}`: [{page}]({page}.md)"
        for group, page in (("head", "heads"), ("recipe", "recipes"), ("data", "data"))
    ]
    configuration = [CONFIGURATION + code((CONFIGS / "run.yaml").read_text(), "yaml")]
    configuration.append("Groups with pages of their own:\n\n" + "\n".join(links))
    for group in groups:
        configuration.append(f"## {group}\n\n" + _overview(group, linked=False))
        configuration += [_section(path, level=3) for path in _files(group)]
    own = {"heads": (HEADS, "head"), "recipes": (RECIPES, "recipe")}
    return {
        "configuration": "\n\n".join(configuration) + "\n",
        "data": _data_page(),
        **{
            page: "\n\n".join([text, _overview(group), *map(_section, _files(group))]) + "\n"
            for page, (text, group) in own.items()
        },
    }


def _data_page() -> str:
    rows = []
    for path in _files("data"):
        found = yaml.safe_load(path.read_text())["data"]
        layout = _class_of(found["_target_"])
        tasks = ", ".join(found.get("_tasks_", ()))
        rows.append(
            [f"[{path.stem}](#{_anchor(path.stem)})", tasks, f"`{layout}`" if layout else ""]
        )
    return "\n\n".join(
        [DATA, table(["data", "tasks", "folder"], rows), *map(_section, _files("data"))]
    )


def _class_of(target: str) -> str:
    import importlib

    module, _, name = target.rpartition(".")
    return str(getattr(getattr(importlib.import_module(module), name, None), "layout", ""))


def _files(group: str) -> list[Path]:
    return sorted((CONFIGS / group).glob("*.yaml"))


def _overview(group: str, *, linked: bool = True) -> str:
    files = _files(group)
    named = [
        f"[{path.stem}](#{_anchor(path.stem)})" if linked else f"`{path.stem}`" for path in files
    ]
    return table(
        [group, "what it is"],
        [[name, prose(_first_sentence(path))] for name, path in zip(named, files, strict=True)],
    )


def _first_sentence(path: Path) -> str:
    return re.split(r"(?<=\.) ", _comment(path))[0]


def _comment(path: Path) -> str:
    lines = itertools.takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
    return " ".join(line.lstrip("# ") for line in lines if not line.startswith("# @"))


def _section(path: Path, level: int = 2) -> str:
    heading = f"{'#' * level} {path.stem}"
    anchor = f"({path.parent.name}-{path.stem})="
    file = f"`configs/{path.relative_to(CONFIGS)}`"
    return f"{anchor}\n{heading}\n\n{file}\n\n{code(path.read_text(), 'yaml')}"


def _anchor(name: str) -> str:
    return name.lower()
