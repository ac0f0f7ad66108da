"""Compose the config of a run, and explain in one sentence what Hydra rejects."""

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
from tools.cli.paths import CONFIGS
from tools.cli.quoting import quote
from tools.config.config_checks import GROUPS
from tools.config.experiment_configs import check_runnable
from tools.config.run_config import compose_command, option_groups, typed_text
from tools.papers.experiments import find_experiment


def compose_checked(overrides: Sequence[str]) -> DictConfig:
    """Compose the config of a run from its overrides.

    Raises:
        ValueError: A name or key is unknown; the message suggests the nearest.
    """
    try:
        for override in overrides:
            _check_group(override, overrides)
            _check_removal(override)
        _check_single_values(overrides)
        check_names(overrides)
        return compose_command(overrides)
    except MissingConfigException as error:
        raise ValueError(_missing_message(error)) from None
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(_unknown_key_message(error, overrides)) from None
    except ValueError as error:
        if "group override" not in str(error):
            _check_sources(overrides)
            raise
        typed = OverridesParser.create().parse_overrides(list(overrides))
        wrong = [
            typed_text(one)
            for one in typed
            if "." not in one.key_or_group and not isinstance(one.value(), str | list)
        ]
        raise ValueError(f"{' or '.join(wrong)} is not an option name; leave it out") from None


def _check_sources(overrides: Sequence[str]) -> None:
    """Check that no named run folder keeps its own sources of an unknown network.

    Raises:
        ValueError: A run folder keeps sources; the message names them.
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
        raise ValueError(f"{override} would keep another backbone's options; pass backbone={value}")
    if group in GROUPS and (group != key or (equals and value in ("", "null"))):
        raise ValueError(f"{override} is not allowed: a run needs its {group}")
    if key == "logger" and value in ("", "null"):
        raise ValueError(f"{override} is not allowed; for metrics.csv only pass logger=csv")
    # Without this Hydra would build a config of every backbone to list their names.
    if key == "backbone" and re.fullmatch(r"[\w-]+", value) and value not in catalogue().backbones:
        raise ValueError(_backbone_message(value))
    if group == "experiment" and re.fullmatch(r"\w+", value) and value != "null":
        check_runnable(find_experiment(value), overrides)
    if group in GROUPS and value.startswith("["):
        raise ValueError(f"{override} has several values; pass -m {group}={value.strip('[]')}")


def _check_single_values(overrides: Sequence[str]) -> None:
    for one in OverridesParser.create().parse_overrides(list(overrides)):
        if one.is_sweep_override():
            line = typed_text(one)
            key, _, values = line.partition("=")
            text = shlex.quote(f"{key}={quote(values)}")
            raise ValueError(
                f"{line} has several values; pass -m {shlex.quote(line)} for a run of each, or "
                f"{text} for one text"
            )


def check_names(overrides: Sequence[str]) -> None:
    """Check that every override has a key, and that values of groups are names.

    A path as a value would let Hydra read a config from anywhere, with classes to instantiate.

    Raises:
        ValueError: An override lacks a key, or its value is not a name.
    """
    for one in OverridesParser.create().parse_overrides(list(overrides)):
        if not one.key_or_group:
            raise ValueError(f"{one.input_line} lacks an option name; type key=value")
        if one.key_or_group.partition("/")[0] not in option_groups():
            continue
        value = one.value()
        chosen = value.list if isinstance(value, ChoiceSweep) else value
        for name in chosen if isinstance(chosen, list) else [chosen]:
            text = name.text if isinstance(name, QuotedString) else name
            path = isinstance(text, str) and (text.startswith("/") or ".." in text.split("/"))
            if path or (isinstance(chosen, list) and not isinstance(text, str)):
                raise ValueError(
                    f"{one.input_line} is not allowed: {one.key_or_group} takes a name; list them "
                    f"with python tools/run.py --help {one.key_or_group}"
                )


def _check_removal(override: str) -> None:
    group = override.partition("=")[0].removeprefix("~")
    if override.startswith("~") and ("." not in group or group.startswith("trainer.")):
        raise ValueError(
            f"{override} is not allowed: a run needs its {group}; pass a value instead"
        )
    if override.startswith("~") and group.endswith(("._target_", ".name")):
        raise ValueError(f"{override} is not allowed: the option defines what is built")


def _missing_message(error: MissingConfigException) -> str:
    group, _, name = str(error.missing_cfg_file).rpartition("/")
    if group == "backbone":  # a backbone has too many options for a message
        return _backbone_message(name)
    options = list(error.options or sorted(path.stem for path in (CONFIGS / group).glob("*.yaml")))
    near = difflib.get_close_matches(name, options, n=3)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return f"unknown {group} {shortened(name)!r}; {hint}known: {listed(options)}"


def _backbone_message(backbone: str) -> str:
    """Return the registry's message for an unknown backbone."""
    try:
        host = catalogue().host_of(backbone)
    except ValueError as refused:
        return str(refused)
    return f"{backbone} is the host {host} itself; pass backbone={host}"


def _unknown_key_message(error: Exception, overrides: Sequence[str]) -> str:
    """Name the nearest valid keys, which are in the config without the unknown one."""
    found = re.search(
        r"Could not (?:override|append to config, an item is already at) '([\w.@/]+)'", str(error)
    )
    if not isinstance(error, ConfigCompositionException) or found is None:
        return " ".join(str(error).split())
    key = found.group(1)
    # The valid options depend on the chosen groups only.
    choices = [override for override in overrides if "." not in override.partition("=")[0]]
    try:
        node: Any = compose_command(
            [o for o in choices if not o.lstrip("+~").startswith(f"{key}=")]
        )
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
    known = sorted(name for name in known if not name.startswith("_")) or ["none"]
    near = difflib.get_close_matches(last, known, n=3)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    where = ".".join(path) or "the config"
    if node is None:
        value = next((o.partition("=")[2] for o in overrides if o.startswith(f"{key}=")), "...")
        inner = key.removeprefix(f"{where}.")
        return f"{where} is null, so {inner} has no place; pass {where}={{{inner}: {value}}}"
    more = f". For an option that the config lacks, type +{key}=..." if path else ""
    return f"unknown option {shortened(last)!r} of {where}; {hint}known: {listed(known)}{more}"
