"""Reads a command of run.py: its flags, its overrides, and the configs that these compose."""

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

from tools.cli.catalogue import catalogue
from tools.cli.literal import literal
from tools.cli.paths import CONFIGS
from tools.cli.processes import is_first_process
from tools.cli.ranges import count_jobs
from tools.cli.typed_network import one_token_mixer
from tools.config.config_checks import tasks_of
from tools.config.hydra_options import SWEEP, check_hydra, is_of_hydra
from tools.config.lazy_groups import register
from tools.config.name_checks import check_names, composed
from tools.config.recipes import without_null
from tools.config.run_config import for_hydra, line_of, option_groups
from tools.config.sweeps import expanded


@dataclass(frozen=True)
class Command:
    """What was typed, checked.

    Attributes:
        arguments: The command as Hydra is to have it, and Lightning where it starts the other
            processes of a run: with the names that patterns stand for.
        overrides: Of the run.
        config: Of a single run what the overrides compose; None where Hydra is to compose: for
            a sweep, and where an option of Hydra's own is typed.
        shown: Of ``--cfg job``, which asks for the config alone, in which form it is shown.
    """

    arguments: list[str]
    overrides: list[str]
    config: DictConfig | None = None
    shown: Literal["", "composed", "resolved"] = ""


def read(typed: Sequence[str]) -> Command:
    """Register the backbones, check a command and compose its config, once.

    Raises:
        ValueError: A name or key that does not exist, with the nearest ones that do.
    """
    register()
    for argument in typed:
        if any("\ud800" <= character <= "\udfff" for character in argument):
            raise ValueError(
                f"{os.fsencode(argument)!r} is no UTF-8 text, which neither config.yaml nor a log "
                "can hold; give the file or folder another name, or a link to it"
            )
    check_hydra(typed)
    arguments, shown = _without_cfg(typed)
    flags = [argument for argument in arguments if argument.startswith("-")]
    if any(flag not in SWEEP for flag in flags) or (shown and flags):
        check_names([one for one in _of_run(typed) if "=" in one])
        return Command(list(typed), [])  # Hydra answers --info and its like itself
    arguments = literal(arguments, sweep=bool(flags))
    arguments = one_token_mixer(arguments)
    arguments = [one for argument in arguments for one in _whole(argument, arguments)]
    arguments = expanded(arguments, sweep=bool(flags), fits=_fitting(arguments))
    arguments = without_null(arguments)
    overrides = _of_run(arguments)
    if not flags:
        config = composed(overrides)
        alone = shown or arguments == overrides
        arguments = for_hydra(arguments, [overrides])
        return Command(arguments, overrides, config if alone else None, shown)
    count = count_jobs(OverridesParser.create().parse_overrides(overrides), _names_of)
    if is_first_process():
        print(f"Sweep of {count:,} run{'s' * (count != 1)}", flush=True)
    jobs = _jobs(overrides)
    # All seeds compose alike.
    for job in dict.fromkeys(tuple(o for o in job if not o.startswith("seed=")) for job in jobs):
        composed(job)
    varied = not option_groups().isdisjoint(swept_keys(arguments))
    # Hydra takes no flag between two overrides.
    arguments = sorted(arguments, key=lambda argument: argument not in SWEEP)
    return Command(for_hydra(arguments, jobs, varied=varied), overrides)


def prepare(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command after ``read``, which begin another process of the same run."""
    return read(arguments).arguments


def _without_cfg(typed: Sequence[str]) -> tuple[list[str], Literal["", "composed", "resolved"]]:
    """A command without ``--cfg job``, and in which form that asks for the config."""
    for spelling in (["--cfg", "job"], ["-c", "job"], ["--cfg=job"]):
        for start in range(len(typed)):
            if list(typed[start : start + len(spelling)]) == spelling:
                rest = [*typed[:start], *typed[start + len(spelling) :]]
                if "--resolve" not in rest:
                    return rest, "composed"
                return [one for one in rest if one != "--resolve"], "resolved"
    return list(typed), ""


def _of_run(arguments: Sequence[str]) -> list[str]:
    """Arguments without flags and options of Hydra's own."""
    return [a for a in arguments if not (a.startswith("-") or is_of_hydra(a))]


def _whole(argument: str, arguments: Sequence[str]) -> list[str]:
    """``head.options={...}`` in words by which Hydra takes keys that are not there yet.

    The part that gets them refuses those that it does not know. With a ``_target_`` nothing stays
    of what was there.
    """
    key, _, value = argument.partition("=")
    if "." not in key or not re.match(r"[A-Za-z_]", key) or not value.startswith("{"):
        return [argument]
    training = not any(a.lstrip("+").startswith("mode=") for a in arguments)
    if "_target_" in value and training:
        return [f"~{key}", f"+{argument}"]
    return [f"++{argument}"]


def swept_keys(arguments: Sequence[str]) -> list[str]:
    """The keys of a sweep's command that have several values."""
    parsed = OverridesParser.create().parse_overrides(_of_run(arguments))
    return [one.get_key_element().lstrip("+~") for one in parsed if one.is_sweep_override()]


def _names_of(group: str) -> list[str]:
    """Return the options of a group, which a glob chooses from."""
    if group == "backbone":
        return list(catalogue().backbones)
    return [path.stem for path in (CONFIGS / group).glob("*.yaml")]


def _fitting(arguments: Sequence[str]) -> Callable[[str, str], bool]:
    """Whether an option of a group is one of the task that is typed, or of the usual one."""
    typed = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    task = typed.get("task", "classification")

    def fits(group: str, name: str) -> bool:
        if group not in ("head", "data", "recipe") or set(task) & set(",*?["):
            return True
        tasks = tasks_of(CONFIGS / group / f"{name}.yaml", group)
        return not tasks or task in tasks

    return fits


def varied_keys(arguments: Sequence[str]) -> list[str]:
    """Keys of a sweep that the folders of its runs do not tell already; none without a sweep."""
    if not any(argument in SWEEP for argument in arguments):
        return []
    return [key for key in swept_keys(arguments) if key not in ("task", "backbone", "ckpt")]


def _jobs(overrides: Sequence[str]) -> list[list[str]]:
    """The overrides of each run of a sweep, but for globs, which name what exists."""
    parts: list[list[str]] = []
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        if not override.is_sweep_override():
            parts.append([line_of(override)])
        elif not isinstance(override.value(), Glob):
            key = override.get_key_element()
            parts.append([f"{key}={value}" for value in override.sweep_string_iterator()])
    return [list(job) for job in itertools.product(*parts)]
