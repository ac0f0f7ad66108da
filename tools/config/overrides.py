"""Read a run.py command: its flags, its overrides, and the configs that they compose."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob
from omegaconf import DictConfig

from tasks.engine.family import families
from tools.cli.catalogue import catalogue
from tools.cli.paths import CONFIGS
from tools.cli.processes import is_first_process
from tools.cli.quoting import quote_arguments
from tools.cli.ranges import count_jobs
from tools.cli.typed_network import join_channel_mixer, join_match, join_token_mixer
from tools.cli.usual_family import usual_task
from tools.config.config_checks import read_tasks
from tools.config.hydra_options import SWEEP, check_hydra, is_hydra_option
from tools.config.lazy_groups import register_groups
from tools.config.name_checks import check_names, compose_checked
from tools.config.recipes import replace_null_recipe
from tools.config.run_config import force_overrides, option_groups, typed_text
from tools.config.sweeps import expand_patterns


@dataclass(frozen=True)
class Command:
    """A checked command.

    Attributes:
        arguments: For Hydra, and for Lightning when it starts the run's other processes; patterns
            are replaced by the names they match.
        overrides: The run's overrides.
        config: The composed config of a single run. None if Hydra composes: for a sweep, and if
            one of Hydra's own options is typed.
        shown: For ``--cfg job``, which prints the config only: the form to print.
        jobs: Overrides of each run of a sweep, seeds alone apart.
    """

    arguments: list[str]
    overrides: list[str]
    config: DictConfig | None = None
    shown: Literal["", "composed", "resolved"] = ""
    jobs: Sequence[Sequence[str]] = ()


def read_command(typed: Sequence[str]) -> Command:
    """Register the backbones, check a command, and compose its config once.

    Raises:
        ValueError: A name or key is unknown; the message suggests the nearest.
    """
    register_groups()
    for argument in typed:
        if any("\ud800" <= character <= "\udfff" for character in argument):
            raise ValueError(
                f"{os.fsencode(argument)!r} must be UTF-8, because config.yaml and logs are; give "
                "the file or folder another name, or a link with one"
            )
    check_hydra(typed)
    arguments, shown = _split_cfg(typed)
    flags = [argument for argument in arguments if argument.startswith("-")]
    if any(flag not in SWEEP for flag in flags) or (shown and flags):
        check_names([one for one in _run_options(typed) if "=" in one])
        return Command(list(typed), [])  # Hydra handles --info and the like itself
    arguments = quote_arguments(arguments, sweep=bool(flags))
    arguments = join_token_mixer(join_channel_mixer(join_match(arguments)))
    arguments = [one for argument in arguments for one in _expand_dict(argument, arguments)]
    arguments = expand_patterns(arguments, sweep=bool(flags), fits=_task_filter(arguments))
    arguments = replace_null_recipe(arguments)
    overrides = _run_options(arguments)
    if not flags:
        config = compose_checked(overrides)
        alone = shown or arguments == overrides
        arguments = force_overrides(arguments, [overrides])
        return Command(arguments, overrides, config if alone else None, shown)
    count = count_jobs(OverridesParser.create().parse_overrides(overrides), _group_options)
    if is_first_process():
        print(f"Sweep of {count:,} run{'s' * (count != 1)}", flush=True)
    jobs = _expand_jobs(overrides)
    # All seeds compose the same config.
    unlike = list(dict.fromkeys(tuple(o for o in j if not o.startswith("seed=")) for j in jobs))
    for job in unlike:
        compose_checked(job)
    varied = not option_groups().isdisjoint(swept_keys(arguments))
    # Hydra rejects a flag between two overrides.
    arguments = sorted(arguments, key=lambda argument: argument not in SWEEP)
    return Command(force_overrides(arguments, jobs, varied=varied), overrides, jobs=unlike)


def process_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments after ``read_command``, for another process of the same run."""
    return read_command(arguments).arguments


def _split_cfg(typed: Sequence[str]) -> tuple[list[str], Literal["", "composed", "resolved"]]:
    """Remove ``--cfg job`` from a command; return the rest and the requested form."""
    for spelling in (["--cfg", "job"], ["-c", "job"], ["--cfg=job"]):
        for start in range(len(typed)):
            if list(typed[start : start + len(spelling)]) == spelling:
                rest = [*typed[:start], *typed[start + len(spelling) :]]
                if "--resolve" not in rest:
                    return rest, "composed"
                return [one for one in rest if one != "--resolve"], "resolved"
    return list(typed), ""


def _run_options(arguments: Sequence[str]) -> list[str]:
    """Drop flags and options of Hydra itself."""
    return [a for a in arguments if not (a.startswith("-") or is_hydra_option(a))]


def _expand_dict(argument: str, arguments: Sequence[str]) -> list[str]:
    """Rewrite ``head.options={...}`` so that Hydra adds keys that are missing in the config.

    The part that receives unknown keys rejects them. A dict with ``_target_`` replaces all previous
    options.
    """
    key, _, value = argument.partition("=")
    if key == "backbone.mixer" and value.startswith("["):  # without options of the host's own FFN
        return [f"~{key}", f"+{argument}"]
    if "." not in key or not re.match(r"[A-Za-z_]", key) or not value.startswith("{"):
        return [argument]
    training = not any(a.lstrip("+").startswith("mode=") for a in arguments)
    if "_target_" in value and training:
        return [f"~{key}", f"+{argument}"]
    return [f"++{argument}"]


def swept_keys(arguments: Sequence[str]) -> list[str]:
    """Return the keys with several values in a sweep's command."""
    parsed = OverridesParser.create().parse_overrides(_run_options(arguments))
    return [one.get_key_element().lstrip("+~") for one in parsed if one.is_sweep_override()]


def _group_options(group: str) -> list[str]:
    """Return the options of a group, for a glob."""
    if group == "backbone":
        return list(catalogue().backbones)
    return [path.stem for path in (CONFIGS / group).glob("*.yaml")]


def _task_filter(arguments: Sequence[str]) -> Callable[[str, str], bool]:
    """Return a filter for the options of a group that fit the typed or default task."""
    typed = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    task = typed.get("task", usual_task())

    def fits(group: str, name: str) -> bool:
        if group == "backbone":
            family = families().get(task)
            return family is None or catalogue().modality(name) == family.modality
        if group not in ("head", "data", "recipe") or set(task) & set(",*?["):
            return True
        tasks = read_tasks(CONFIGS / group / f"{name}.yaml", group)
        return not tasks or task in tasks

    return fits


def varied_keys(arguments: Sequence[str]) -> list[str]:
    """Return the swept keys that the names of run folders do not show; empty without a sweep."""
    if not any(argument in SWEEP for argument in arguments):
        return []
    return [key for key in swept_keys(arguments) if key not in ("task", "backbone", "ckpt")]


def _expand_jobs(overrides: Sequence[str]) -> list[list[str]]:
    """Expand a sweep into the overrides of each run, without globs, whose names all exist."""
    parts: list[list[str]] = []
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        if not override.is_sweep_override():
            parts.append([typed_text(override)])
        elif not isinstance(override.value(), Glob):
            key = override.get_key_element()
            parts.append([f"{key}={value}" for value in override.sweep_string_iterator()])
    return [list(job) for job in itertools.product(*parts)]
