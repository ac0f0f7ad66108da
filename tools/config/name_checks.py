"""Compose the config of a run, and explain in one sentence what Hydra rejects."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from backbones.options import unknown
from tasks.engine.run_folder.bounded_reading import DamagedFile
from tasks.engine.run_folder.saved_runs import CONFIG
from tasks.engine.run_folder.schemas import read_run_config
from tasks.engine.run_folder.source_copies import check_sources
from tools.cli.catalogue import catalogue
from tools.cli.grammar import MIXERS, key_of, parse
from tools.cli.paths import CONFIGS
from tools.cli.quoting import quote
from tools.cli.typed_network import known_options
from tools.config.config_checks import GROUPS
from tools.config.run_config import compose_command, is_choice


def compose_checked(words: Sequence[str]) -> DictConfig:
    """Compose the config of a run from its words.

    Raises:
        ValueError: The name of a group's option is unknown; the message suggests the nearest.
    """
    try:
        for word in words:
            _check_group(word, words)
        check_names(words)
        config = compose_command(words)
        _check_backbone(words, config.backbone.name)
        return config
    except MissingConfigException as error:
        raise ValueError(_missing_message(error)) from None
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(" ".join(str(error).split())) from None
    except ValueError:
        _check_sources(words)
        raise


def _check_sources(words: Sequence[str]) -> None:
    """Check that no named run folder keeps its own sources of an unknown network.

    Raises:
        ValueError: A run folder keeps sources; the message names them.
    """
    for word in words:
        if key_of(word) == "ckpt" and isinstance(value := parse(word).value(), str):
            path = Path(value).expanduser()
            folder = (path if path.is_dir() else path.parent.parent).resolve()
            with contextlib.suppress(FileNotFoundError, DamagedFile):
                check_sources(folder, read_run_config(folder / CONFIG)["backbone"])


def _check_backbone(words: Sequence[str], name: str) -> None:
    """Check the names of a backbone's options, and of its mixers', by the catalogue."""
    valid_names = known_options(name)
    for key in map(key_of, words):
        parent = key.rpartition(".")[0]
        if parent in ("backbone", *MIXERS) and key not in valid_names:
            raise ValueError(unknown(f"option of {name}", key, valid_names))


def _check_group(override: str, overrides: Sequence[str]) -> None:
    key, equals, value = override.lstrip("+").partition("=")
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
        from tools.papers.experiment_configs import check_runnable
        from tools.papers.experiments import find_experiment

        check_runnable(find_experiment(value), overrides)
    if group in GROUPS and value.startswith("["):
        raise ValueError(f"{override} has several values; pass -m {group}={value.strip('[]')}")
    if override.startswith("~") and ("." not in group or group.startswith("trainer.")):
        raise ValueError(
            f"{override} is not allowed: a run needs its {group}; pass a value instead"
        )
    if override.startswith("~") and group.endswith(("._target_", ".name")):
        raise ValueError(f"{override} is not allowed: the option defines what is built")


def check_names(words: Sequence[str]) -> None:
    """Check that every word has a key and one value, and that values of groups are names.

    A path as a value would let Hydra read a config from anywhere, with classes to instantiate.

    Raises:
        ValueError: A word lacks a key or has several values, or its value is not a name.
    """
    for word in words:
        override = parse(word)
        if override.is_sweep_override():
            key, _, values = word.partition("=")
            text = shlex.quote(f"{key}={quote(values)}")
            raise ValueError(
                f"{word} has several values; pass -m {shlex.quote(word)} for a run of each, or "
                f"{text} for one text"
            )
        if not is_choice(word):
            continue
        value = override.value()
        for name in value if isinstance(value, list) else [value]:
            if name is not None and not (isinstance(name, str) and re.fullmatch(r"[\w.-]+", name)):
                group = override.key_or_group
                raise ValueError(
                    f"{word} is not allowed: {group} takes a name; list them with python "
                    f"tools/run.py --help {group}"
                )


def _missing_message(error: MissingConfigException) -> str:
    group, _, name = str(error.missing_cfg_file).rpartition("/")
    if group == "backbone":  # a backbone has too many options for a message
        return _backbone_message(name)
    options = list(error.options or sorted(path.stem for path in (CONFIGS / group).glob("*.yaml")))
    return unknown(group, name, options)


def _backbone_message(backbone: str) -> str:
    """Return the registry's message for an unknown backbone."""
    try:
        host = catalogue().host_of(backbone)
    except ValueError as refused:
        return str(refused)
    return f"{backbone} is the host {host} itself; pass backbone={host}"
