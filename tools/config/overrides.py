"""Read a run.py command: its flags, its overrides, and the configs that they compose."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from omegaconf import DictConfig

from tools.cli.catalogue import catalogue
from tools.cli.grammar import expand, key_of, parse
from tools.cli.paths import CONFIGS
from tools.cli.processes import is_first_process
from tools.cli.quoting import quote, quote_arguments
from tools.cli.typed_network import join_channel_mixer
from tools.config.hydra_options import SWEEP, check_hydra, is_hydra_option
from tools.config.lazy_groups import register_groups
from tools.config.name_checks import check_names, compose_checked

JOB = "job"  # option of Hydra's config with the words of a run


@dataclass(frozen=True)
class Command:
    """A checked command.

    Attributes:
        words: The words of the run, which also start its other processes; those of a sweep have
            several values.
        config: The composed config of a single run. None for a sweep, and for a command that Hydra
            answers.
        form: For ``--cfg job``, which prints the config only: the form to print.
        jobs: Words of each run of a sweep.
        hydra: The flags and options of Hydra itself; a run with them starts in a job of Hydra's.
    """

    words: list[str]
    config: DictConfig | None = None
    form: Literal["", "composed", "resolved"] = ""
    jobs: Sequence[list[str]] = ()
    hydra: Sequence[str] = ()

    def hydra_arguments(self) -> list[str]:
        """Return the arguments with which Hydra does the runs of this command."""
        texts = ",".join(quote(shlex.join(job)) for job in self.jobs)
        folder = (
            [word for word in self.jobs[0] if key_of(word) == "output_dir"] if self.jobs else []
        )
        return [*self.hydra, *folder, f"+{JOB}={texts}"] if self.jobs else list(self.hydra)


def read_command(line: Sequence[str]) -> Command:
    """Register the backbones, check a command, and compose its config once.

    Raises:
        ValueError: A name or key is unknown; the message suggests the nearest.
    """
    register_groups()
    for argument in line:
        if any("\ud800" <= character <= "\udfff" for character in argument):
            raise ValueError(
                f"{os.fsencode(argument)!r} must be UTF-8, because config.yaml and logs are; give "
                "the file or folder another name, or a link with one"
            )
    check_hydra(line)
    arguments, form = _split_cfg(line)
    hydra = [word for word in arguments if word.startswith("-") or is_hydra_option(word)]
    words = [word for word in arguments if word not in hydra]
    flags = [word for word in hydra if word.startswith("-")]
    sweep = bool(flags)
    if any(flag not in SWEEP for flag in flags) or (form and flags):
        check_names([word for word in words if "=" in word])
        return Command([], hydra=line)  # Hydra handles --info and the like itself
    words = join_channel_mixer(quote_arguments(words, sweep=sweep))
    if any(set(word) & set("*?") for word in words):
        from tools.config.sweeps import expand_patterns

        words = expand_patterns(words, sweep=sweep)
    if not sweep:
        config = compose_checked(words)
        jobs = [words] if hydra and not form else []
        return Command(words, config, form, jobs, hydra)
    jobs = expand(words, _group_options)
    if is_first_process():
        print(f"Sweep of {len(jobs):,} run{'s' * (len(jobs) != 1)}", flush=True)
    for job in unlike_jobs(jobs):
        compose_checked(job)
    return Command(words, jobs=jobs, hydra=hydra)


def unlike_jobs(jobs: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Return the jobs of a sweep without their seeds, each once; all seeds compose one config."""
    return list(dict.fromkeys(tuple(w for w in job if key_of(w) != "seed") for job in jobs))


def _split_cfg(arguments: Sequence[str]) -> tuple[list[str], Literal["", "composed", "resolved"]]:
    """Remove ``--cfg job`` from a command; return the rest and the requested form."""
    for spelling in (["--cfg", "job"], ["-c", "job"], ["--cfg=job"]):
        for start in range(len(arguments)):
            if list(arguments[start : start + len(spelling)]) == spelling:
                rest = [*arguments[:start], *arguments[start + len(spelling) :]]
                if "--resolve" not in rest:
                    return rest, "composed"
                return [word for word in rest if word != "--resolve"], "resolved"
    return list(arguments), ""


def swept_keys(words: Sequence[str]) -> list[str]:
    """Return the keys with several values in a sweep's command."""
    return [key_of(word) for word in words if parse(word).is_sweep_override()]


def _group_options(group: str) -> list[str]:
    """Return the options of a group, for a glob."""
    if group == "backbone":
        return list(catalogue().backbones)
    return [path.stem for path in (CONFIGS / group).glob("*.yaml")]


def varied_keys(words: Sequence[str]) -> list[str]:
    """Return the swept keys that the names of run folders do not show."""
    return [key for key in swept_keys(words) if key not in ("task", "backbone", "ckpt")]
