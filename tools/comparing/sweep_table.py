"""Run a sweep, and print the table of its runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from tools.comparing.run_records import read_run
from tools.comparing.side_by_side import DEFAULTS, show
from tools.comparing.table import setting


def outcomes_of(main: Callable[[], Any]) -> list[Mapping[str, Any]]:
    """Run a function of ``hydra.main``; return what the runs of its sweep returned.

    Hydra itself returns nothing for a sweep. It would also compose configs again for the mode and
    for each run, although the check of the command has already done so.
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
        outcomes: The results of the runs.
        swept: The settings that differ between the runs; they name the rows.
    """
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
