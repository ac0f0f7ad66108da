"""Composes what is typed for a run, and says in one sentence what Hydra refuses of it."""

from __future__ import annotations

import contextlib
import difflib
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, QuotedString
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from backbones.options import listed, shortened
from tasks.engine.plain_files import DamagedFile
from tasks.engine.run_files import read_run_config
from tasks.engine.saved_config import CONFIG
from tasks.engine.sources import check_sources
from tools.cli.catalogue import catalogue
from tools.cli.literal import quoted
from tools.cli.paths import CONFIGS
from tools.config.config_checks import GROUPS
from tools.config.experiment_words import check_runs
from tools.config.run_config import config_of, line_of, option_groups
from tools.papers.experiments import find_experiment


def composed(overrides: Sequence[str]) -> DictConfig:
    """The config that the overrides of a run compose.

    Raises:
        ValueError: A name or key that does not exist, with the nearest ones that do.
    """
    try:
        for override in overrides:
            _check_group(override, overrides)
            _check_removal(override)
        _refuse_several(overrides)
        check_names(overrides)
        return config_of(overrides)
    except MissingConfigException as error:
        raise ValueError(_missing(error)) from None
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(_unknown_key(error, overrides)) from None
    except ValueError as error:
        if "group override" not in str(error):
            _check_sources(overrides)
            raise
        typed = OverridesParser.create().parse_overrides(list(overrides))
        wrong = [
            line_of(one)
            for one in typed
            if "." not in one.key_or_group and not isinstance(one.value(), str | list)
        ]
        raise ValueError(f"{' or '.join(wrong)} is no name of an option; leave it out") from None


def _check_sources(overrides: Sequence[str]) -> None:
    """Refuse a run folder whose network is unknown here and whose files it keeps.

    Raises:
        ValueError: Names the files.
    """
    for one in OverridesParser.create().parse_overrides(list(overrides)):
        if one.key_or_group == "ckpt" and isinstance(value := one.value(), str):
            path = Path(value).expanduser()
            folder = (path if path.is_dir() else path.parent.parent).resolve()
            with contextlib.suppress(FileNotFoundError, DamagedFile):
                check_sources(folder, read_run_config(folder / CONFIG)["backbone"])


def _check_group(override: str, overrides: Sequence[str]) -> None:
    key, equals, value = override.partition("=")
    group = key.removeprefix("~")
    if key == "backbone.name":
        raise ValueError(f"{override} leaves another one's options; pass backbone={value}")
    if group in GROUPS and (group != key or (equals and value in ("", "null"))):
        raise ValueError(f"{override} is refused: a run needs its {group}")
    if key == "logger" and value in ("", "null"):
        raise ValueError(f"{override} is refused: logger=csv leaves metrics.csv alone")
    # Hydra would first make a config of every backbone, to name them.
    if key == "backbone" and re.fullmatch(r"[\w-]+", value) and value not in catalogue().backbones:
        raise ValueError(_refusal(value))
    if group == "experiment" and re.fullmatch(r"\w+", value) and value != "null":
        check_runs(find_experiment(value), overrides)
    if group in GROUPS and value.startswith("["):
        raise ValueError(f"{override} names several; pass -m {group}={value.strip('[]')}")


def _refuse_several(overrides: Sequence[str]) -> None:
    for one in OverridesParser.create().parse_overrides(list(overrides)):
        if one.is_sweep_override():
            line = line_of(one)
            key, _, values = line.partition("=")
            text = shlex.quote(f"{key}={quoted(values)}")
            raise ValueError(
                f"{line} has several values; pass -m {shlex.quote(line)} for a run of each, or "
                f"{text} for one text"
            )


def check_names(overrides: Sequence[str]) -> None:
    """Refuse what has no key, and values of groups that are not names of their options.

    Hydra would read a config from anywhere that a path leads to, with classes that it instantiates.

    Raises:
        ValueError: Names the override.
    """
    for one in OverridesParser.create().parse_overrides(list(overrides)):
        if not one.key_or_group:
            raise ValueError(f"{one.input_line} names no option; type key=value")
        if one.key_or_group.partition("/")[0] not in option_groups():
            continue
        value = one.value()
        chosen = value.list if isinstance(value, ChoiceSweep) else value
        for name in chosen if isinstance(chosen, list) else [chosen]:
            text = name.text if isinstance(name, QuotedString) else name
            path = isinstance(text, str) and (text.startswith("/") or ".." in text.split("/"))
            if path or (isinstance(chosen, list) and not isinstance(text, str)):
                raise ValueError(
                    f"{one.input_line} is refused: {one.key_or_group} takes names; "
                    f"python tools/run.py --help {one.key_or_group} lists them"
                )


def _check_removal(override: str) -> None:
    group = override.partition("=")[0].removeprefix("~")
    if override.startswith("~") and ("." not in group or group.startswith("trainer.")):
        raise ValueError(f"{override} is refused: a run needs its {group}; give a value instead")
    if override.startswith("~") and group.endswith(("._target_", ".name")):
        raise ValueError(f"{override} is refused: nothing else says what to build")


def _missing(error: MissingConfigException) -> str:
    group, _, name = str(error.missing_cfg_file).rpartition("/")
    if group == "backbone":  # its options are too many for a message
        return _refusal(name)
    options = list(error.options or sorted(path.stem for path in (CONFIGS / group).glob("*.yaml")))
    near = difflib.get_close_matches(name, options, n=3)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return f"there is no {group} called {shortened(name)!r}; {hint}known: {listed(options)}"


def _refusal(backbone: str) -> str:
    """What the registry says to a name that it does not know."""
    try:
        host = catalogue().host_of(backbone)
    except ValueError as refused:
        return str(refused)
    return f"{backbone} is {host} itself; pass backbone={host}"


def _unknown_key(error: Exception, overrides: Sequence[str]) -> str:
    """Hydra names the key that does not exist; the valid ones are in the config without it."""
    found = re.search(
        r"Could not (?:override|append to config, an item is already at) '([\w.@/]+)'", str(error)
    )
    if not isinstance(error, ConfigCompositionException) or found is None:
        return " ".join(str(error).split())
    key = found.group(1)
    # Which options exist depends on the chosen groups only.
    choices = [override for override in overrides if "." not in override.partition("=")[0]]
    try:
        node: Any = config_of([o for o in choices if not o.lstrip("+~").startswith(f"{key}=")])
    except (HydraException, OmegaConfBaseException):
        return " ".join(str(error).split())
    *parents, last = key.split(".")
    path: list[str] = []
    for parent in parents:
        if not isinstance(node, DictConfig) or parent not in node:
            last = parent
            break
        node, path = node[parent], [*path, parent]
    known = [str(name) for name in node] if isinstance(node, DictConfig) else []
    known = sorted(name for name in known if not name.startswith("_"))
    near = difflib.get_close_matches(last, known, n=3)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    where = ".".join(path) or "the config"
    more = f". If its code takes more, +{key}=... adds it" if path else ""
    return f"{where} has no option {shortened(last)!r}; {hint}it has: {listed(known)}{more}"
