"""Sweeps: patterns of names as values, runs in other processes, and the table at the end."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from tools.command_line.arguments import select
from tools.comparing.experiments import experiments

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
GROUPS = ("task", "head", "data", "trainer", "recipe", "experiment", "protocol")
SIGNS = "*?"

Fits = Callable[[str, str], bool]


def expanded(arguments: Sequence[str], *, sweep: bool, fits: Fits) -> list[str]:
    """A command in which patterns, such as ``backbone=swin_t*``, are the names they stand for.

    Args:
        arguments: As they were typed.
        sweep: Whether several values are allowed.
        fits: Whether an option of a group fits the command's task.

    Raises:
        ValueError: A pattern of nothing, or one where a single name has to be.
    """
    found = []
    for argument in arguments:
        key, _, value = argument.partition("=")
        plain = not set(value) & set("()[]{}'\"")
        if key not in ("backbone", *GROUPS) or not plain or not set(value) & set(SIGNS):
            found.append(argument)
            continue
        if not sweep:
            raise ValueError(f"{argument} names several; pass -m {argument}")
        names = select(value) if key == "backbone" else _options(key, value, fits, arguments)
        found.append(f"{key}={','.join(names)}")
    return found


def _options(group: str, value: str, fits: Fits, arguments: Sequence[str]) -> list[str]:
    if group == "experiment":
        typed = {argument.partition("=")[0].lstrip("+") for argument in arguments}
        known = [
            name
            for name, row in experiments().items()
            if not row.train.cannot_run or typed & set(row.train.needs)
        ]
    else:
        known = sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))
    names = []
    for item in value.split(","):
        pattern = any(sign in item for sign in SIGNS)
        matching = [name for name in fnmatch.filter(known, item) if fits(group, name)]
        if pattern and not matching:
            listed = "--help experiment lists all" if group == "experiment" else ", ".join(known)
            raise ValueError(f"no {group} for this task matches {item!r}; known: {listed}")
        names += matching if pattern else [item]
    return list(dict.fromkeys(names))


def outcomes_of(main: Callable[[], Any]) -> list[Mapping[str, Any]]:
    """Run a function of ``hydra.main``; what the runs of its sweep returned, wherever they ran.

    Hydra itself returns nothing of a sweep. Nor does it know that all runs have been composed for
    the check of the command: it would once for the mode, which ``-m`` says, and once a run.
    """
    from hydra._internal.hydra import Hydra
    from hydra.plugins.sweeper import Sweeper

    original, kept = Hydra.multirun, []

    def multirun(hydra: Hydra, *args: Any, **options: Any) -> Any:
        kept.extend(original(hydra, *args, **options))

    with (
        mock.patch.object(Hydra, "multirun", multirun),
        mock.patch.object(Hydra, "get_mode", return_value=None),
        mock.patch.object(Sweeper, "validate_batch_is_legal", return_value=None),
    ):
        main()
    return [job.return_value for batch in kept for job in batch]


def show_table(outcomes: Sequence[Mapping[str, Any]], swept: Sequence[str]) -> None:
    """Print the table of a sweep's training runs, if any of them is finished.

    Args:
        outcomes: What the runs returned.
        swept: The settings that differ between the runs, which name the rows.
    """
    from tools.comparing.records import read_run
    from tools.comparing.side_by_side import DEFAULTS, show
    from tools.comparing.table import setting

    folders = [Path(one["folder"]) for one in outcomes if one["folder"]]
    runs = [read_run(folder) for folder in folders]
    finished = [run for run in runs if run.status == "finished"]
    if not finished:
        return
    by = [key for key in dict.fromkeys(swept) if key not in ("seed", "task", "backbone")]
    by = [key for key in by if any(setting(run, key)[1] is not None for run in finished)]
    several = len(by) == 1 and len({str(setting(run, by[0])[1]) for run in finished}) > 1
    axis = by[0] if several else ""  # of the plot
    options = {**DEFAULTS, "by": ",".join(["backbone", *by]), "plot": axis}
    print()
    show(folders, options)
