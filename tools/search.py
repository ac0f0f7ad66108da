"""Searches for good settings with Optuna: each trial is a run of its own, all kept on disk.

usage: python tools/search.py [run.py's arguments ...] KEY=SPACE ... [trials=20] [key=value ...]

  KEY=SPACE                 a setting to search, in Hydra's words for the values of a sweep:
                              optimizer.lr=interval(1e-4,1e-2,log)   numbers between, on a log scale
                              task.drop=interval(0,0.3)              numbers between
                              schedule.warmup=range(0,5)             whole numbers below 5
                              backbone=swin_t,deit_t  or choice(..)  names, numbers, true, false
  trials=20                 finished trials in all, with those of earlier calls
  metric=top1               of the closing test (default: top1, AP or mIoU)
  direction=maximize        or minimize
  sampler=tpe               or random
  sampler_seed=0            decides the first trials
  name=NAME                 of the search (default: <task>_<backbone>), which lies in
                            <output_dir>/searches/<name>

Everything else is passed to tools/run.py as it is. The same command goes on with a search that was
broken off or has fewer trials than asked for; a trial that was interrupted is run again. A run that
fails is a failed trial and the search goes on. Quote what has parentheses.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Run as a script, Python sees the folder tools/ only; the packages lie one level up.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tasks.engine.plain_files import read_json
from tasks.engine.run_files import read_summary
from tasks.engine.signals import STATUSES
from tools.cli.arguments import number, parse
from tools.cli.command import answer, exit_with
from tools.cli.errors import one_line_errors
from tools.cli.network_names import name_of
from tools.cli.paths import ROOT
from tools.cli.tables import write
from tools.comparing.table import HEADLINE
from tools.searching.space import Space, read_spaces, typed_values

DEFAULTS = {
    "trials": "20", "metric": "", "direction": "maximize", "sampler": "tpe", "sampler_seed": "0",
    "name": "",
}  # fmt: skip
CHOICES = {"direction": ("maximize", "minimize"), "sampler": ("tpe", "random")}
JOURNAL, SETTINGS = "journal.log", "search.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, or 2 for arguments that cannot be served."""
    return answer("search.py", __doc__, ask, arguments, needs_arguments=True)


def ask(arguments: Sequence[str]) -> None:
    """Search as the arguments say; errors of runs are worded as runs word them."""
    own = [item for item in arguments if item.partition("=")[0] in DEFAULTS]
    with one_line_errors():
        search([item for item in arguments if item not in own], parse(own, DEFAULTS, CHOICES))


def search(typed: Sequence[str], options: Mapping[str, str]) -> None:
    """Ask, run and tell until there are as many finished trials as asked for.

    Raises:
        ValueError: A space or name that means nothing, or another search of the same name.
    """
    try:
        import optuna
    except ImportError as error:
        raise ValueError(
            "a search needs the package optuna: pip install -c constraints.txt -e '.[search]'"
        ) from error
    from filelock import FileLock, Timeout

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    spaces, fixed = read_spaces(typed)
    wanted = number("trials", options["trials"])
    folder, metric = _prepare(spaces, fixed, options)
    try:
        with FileLock(folder / "lock", timeout=0):
            study = _study(folder, options)
            _again(study)
            _go_on(study, spaces, fixed, wanted, metric, folder)
            _show(study, metric)
    except Timeout:
        raise ValueError(
            f"another process is at the search in {folder}; wait or pass name="
        ) from None


def _prepare(
    spaces: Sequence[Space], fixed: Sequence[str], options: Mapping[str, str]
) -> tuple[Path, str]:
    """The folder of the search and its metric, when its first run is known to be a right one."""
    from tools.config.overrides import read
    from tools.config.run_config import job_config

    read([*fixed, *(space.last for space in spaces)])
    command = read([*fixed, *(space.first for space in spaces)])
    config = job_config(command.overrides, command.config)
    task, backbone = config["task_name"], name_of(config["backbone"])
    metric = options["metric"] or HEADLINE.get(task, "")
    searched = {space.key for space in spaces}
    usual = task if "backbone" in searched else f"{task}_{backbone}"
    folder = Path(config["output_dir"]) / "searches" / (options["name"] or usual)
    settings = {
        "spaces": [str(space) for space in spaces], "fixed": sorted(fixed), "metric": metric,
        "direction": options["direction"],
    }  # fmt: skip
    path = folder / SETTINGS
    if path.exists():
        before = read_json(path)
        if not isinstance(before, dict):
            raise ValueError(f"{path} is damaged; pass name=<another name> or remove {folder}")
        differ = [
            f"{key}: {before.get(key)} then, {value} now"
            for key, value in settings.items()
            if before.get(key) != value
        ]
        if differ:
            raise ValueError(
                f"{folder} holds a search of other settings ({'; '.join(differ)}); pass the same "
                "ones to go on with it, or name=<another name>"
            )
    else:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings, indent=2) + "\n")
    return folder, metric


def _study(folder: Path, options: Mapping[str, str]) -> Any:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend
    from optuna.study import StudyDirection

    directions = {"maximize": StudyDirection.MAXIMIZE, "minimize": StudyDirection.MINIMIZE}
    direction = directions[options["direction"]]
    storage = JournalStorage(JournalFileBackend(str(folder / JOURNAL)))
    study = optuna.create_study(
        study_name=folder.name, storage=storage, direction=direction,
        load_if_exists=True,
    )  # fmt: skip
    # With the seed alone a search that goes on would draw the trials that it began with.
    seed = number("sampler_seed", options["sampler_seed"], least=0) + len(study.trials)
    samplers = {"tpe": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}
    study.sampler = samplers[options["sampler"]](seed=seed)
    return study


def _again(study: Any) -> None:
    """Queue the trials that were running when an earlier search was broken off."""
    from optuna.trial import TrialState

    for trial in study.get_trials(states=[TrialState.RUNNING]):
        study.tell(trial.number, state=TrialState.FAIL)
        study.enqueue_trial(trial.params)


def _go_on(
    study: Any,
    spaces: Sequence[Space],
    fixed: Sequence[str],
    wanted: int,
    metric: str,
    folder: Path,
) -> None:
    from optuna.trial import TrialState

    failures = 0
    while (done := len(study.get_trials(states=[TrialState.COMPLETE]))) < wanted:
        trial = study.ask({space.key: space.distribution() for space in spaces})
        values = typed_values(spaces, trial.params)
        print(f"trial {trial.number} ({done + 1} of {wanted}): {' '.join(values)}", flush=True)
        run = _run([*fixed, *values], folder / f"trial_{trial.number:04d}.log")
        if run is None:
            study.tell(trial.number, state=TrialState.FAIL)
            failures += 1
            if failures == 3 and done == 0:
                raise ValueError(f"the first three trials failed; see the logs in {folder}")
            continue
        metrics = read_summary(run / "summary.json")["metrics"]
        if metric not in metrics:
            study.tell(trial.number, state=TrialState.FAIL)
            raise ValueError(f"the runs have no metric {metric!r}; known: {', '.join(metrics)}")
        trial.set_user_attr("folder", str(run))
        study.tell(trial.number, metrics[metric])
        print(f"  {metric} {metrics[metric]:.4g}  {run}", flush=True)


def _run(overrides: Sequence[str], log: Path) -> Path | None:
    """One run by the command that a user types; its folder, or None if it failed."""
    command = [sys.executable, str(ROOT / "tools" / "run.py"), *overrides]
    with log.open("w") as file:
        ended = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT)
    lines = log.read_text(errors="replace").strip().splitlines()
    if ended.returncode in STATUSES:
        raise KeyboardInterrupt
    if ended.returncode:
        print(f"  failed: {lines[-1] if lines else 'no output'}", flush=True)
        return None
    return Path(lines[-1].removeprefix("Run folder: ")).resolve()


def _show(study: Any, metric: str) -> None:
    """The trials, best first, and the settings of the best one as they are typed."""
    from optuna.study import StudyDirection
    from optuna.trial import TrialState

    trials = study.get_trials(states=[TrialState.COMPLETE])
    trials.sort(key=lambda trial: trial.value, reverse=study.direction is StudyDirection.MAXIMIZE)
    keys = dict.fromkeys(key for trial in trials for key in trial.params)
    records = [
        {"trial": trial.number, metric: trial.value, **{key: trial.params.get(key) for key in keys}}
        for trial in trials
    ]
    columns = {"trial": ("trial", "{}"), metric: (metric, "{:.4g}")}
    columns |= {key: (key, "{}") for key in keys}
    write(records, "table", columns)
    best = trials[0]
    print(f"best: {' '.join(f'{key}={value}' for key, value in best.params.items())}")
    print(f"Run folder: {best.user_attrs['folder']}")


if __name__ == "__main__":
    exit_with(main, writes_files=True)
