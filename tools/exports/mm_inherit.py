"""Write configs of the MM toolkits that inherit from base files and only list the differences.

The toolkit's base files are copied beside the config (``_base_/``), so it opens offline with any
distribution of the toolkit; mmengine's ``mmseg::`` knows just one of them. The data folder, the
classes and the pipelines are variables, written once.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmengine import Config

from heads.toolkits.toolkit import base_configs

BASES = "_base_"
# Written first in this order, because later lines use them.
PIPELINES = ("train_pipeline", "test_pipeline")
VARIABLES = ("custom_imports", "default_scope", "data_root", "metainfo", *PIPELINES)
# Keys with values from a variable.
NAMED = {"metainfo": ("metainfo",), "pipeline": PIPELINES}
MARK = "<variable {}>"


def write_config(
    folder: Path,
    file: str,
    toolkit: str,
    bases: Sequence[str],
    config: Mapping[str, Any],
    title: str,
) -> list[Path]:
    """Write a config and copies of its bases, and return the files.

    Args:
        folder: Folder to write to.
        file: Name of the config.
        toolkit: "mmdet", "mmseg" or "mmpretrain".
        bases: The toolkit's base files, such as ``datasets/coco_instance``.
        config: The complete content of the config.
        title: First line of the file.
    """
    copies = [_copy(toolkit, base, folder) for base in bases]
    inherited: dict[str, Any] = {}
    for copy in copies:
        inherited |= Config.fromfile(copy).to_dict()
    differing = _differing(config, inherited, ())
    # Pipelines that a replaced part uses are written too, even if they are inherited.
    repeated = [key for key in PIPELINES if _holds(differing, config.get(key))]
    differing = _differing(config, inherited, repeated)
    order = [*(key for key in VARIABLES if key in differing), *sorted(differing.keys() - VARIABLES)]
    parents = [f'    "{copy.relative_to(folder).as_posix()}",' for copy in copies]
    lines = [f'"""{title}"""', "", f"{BASES} = [", *parents, "]", ""]
    for key in order:
        text = Config({key: differing[key]}).pretty_text
        lines.append(_name_variables(text).rstrip())
    path = folder / file
    path.write_text("\n".join(lines) + "\n")
    content = Config.fromfile(path).to_dict()
    # mmengine inserts the folder's path with this very function.
    places = {"{{ fileDirname }}": os.path.abspath(folder)}  # noqa: PTH100
    lost = [key for key, value in config.items() if content.get(key) != _replaced(value, places)]
    assert not lost, f"the written config differs in {lost}"
    return [path, *copies]


def _differing(
    config: Mapping[str, Any], inherited: Mapping[str, Any], repeated: Sequence[str]
) -> dict[str, Any]:
    names = [
        key
        for key in VARIABLES
        if key in config and (key in ("data_root", *repeated) or config[key] != inherited.get(key))
    ]
    differing = changes(inherited, _mark_variables(config, names))
    return differing | {key: config[key] for key in names}


def _holds(value: Any, sought: Any) -> bool:
    """Return True if nested dicts have a value anywhere."""
    if isinstance(value, Mapping):
        return any(_holds(item, sought) for item in value.values())
    return sought is not None and bool(value == sought)


def changes(inherited: Mapping[str, Any], target: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that, merged into the inherited config, give the wanted one.

    Inherited keys at the top level stay, because a config cannot remove them.
    """
    differing = {}
    for key, value in target.items():
        if key in inherited and inherited[key] == value:
            continue
        value_before = inherited.get(key)
        if isinstance(value, Mapping) and isinstance(value_before, Mapping):
            inherits = value_before.keys() <= value.keys()
            value = changes(value_before, value) if inherits else {"_delete_": True, **value}
        differing[key] = value
    return differing


def _copy(toolkit: str, base: str, folder: Path) -> Path:
    """Copy a base file of the installed toolkit under its own name."""
    target = folder / BASES / f"{base}.py"
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(base_configs(toolkit) / f"{base}.py", target)
    return target


def _mark_variables(config: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Mark the places of a config that use one of these variables."""
    root = config.get("data_root")

    def mark(key: str, value: Any) -> Any:
        for name in NAMED.get(key, ()):
            if name in names and value == config[name]:
                return MARK.format(name)
        if isinstance(value, Mapping):
            return {name: mark(name, item) for name, item in value.items()}
        if key in ("data_root", "ann_file") and root and str(value).startswith(root):
            return MARK.format("data_root") + value.removeprefix(root)
        return value

    return {key: value if key in VARIABLES else mark("", value) for key, value in config.items()}


def _name_variables(text: str) -> str:
    """Replace the marks in a config's text by variables."""
    mark = re.escape(MARK).replace(r"\{\}", r"(\w+)")

    def variable(match: re.Match[str]) -> str:
        return f"{match[1]} + '{match[2]}'" if match[2] else match[1]

    return re.sub(f"'{mark}([^']*)'", variable, text)


def _replaced(value: Any, texts: Mapping[str, str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _replaced(item, texts) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_replaced(item, texts) for item in value)
    for mark, text in texts.items():
        value = value.replace(mark, text) if isinstance(value, str) else value
    return value
