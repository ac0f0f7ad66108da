"""Search good settings with Optuna; each trial is a run of its own, and all runs are kept.

usage: python tools/search.py [run.py's arguments ...] KEY=SPACE ... [trials=20] [key=value ...]

  KEY=SPACE                 a setting to search, in Hydra's syntax for sweeps:
                              optimizer.lr=interval(1e-4,1e-2,log)   numbers, on a log scale
                              task.drop=interval(0,0.3)              numbers
                              schedule.warmup=range(0,5)             whole numbers below 5
                              backbone=swin_t,deit_t  or choice(..)  names, numbers, true, false
  trials=20                 total number of finished trials, including those of earlier calls
  metric=top1               of the final test (default: the task's main one)
  direction=maximize        or minimize (default: the metric's own)
  sampler=tpe               or random
  sampler_seed=0            decides the first trials
  name=NAME                 of the search (default: <task>_<backbone>); its folder is
                            <output_dir>/searches/<name>

All other arguments are passed to tools/run.py. Repeat the command to continue an interrupted search
or one with fewer trials than requested; interrupted trials run again. A failed run is a failed
trial, and the search continues. Put values with parentheses in quotes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# As a script, Python only finds modules in tools/; the packages are one level up.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tasks.engine.family import find_family
from tasks.engine.loops.signals import STATUSES
from tasks.engine.run_folder.bounded_reading import read_json
from tasks.engine.run_folder.schemas import read_summary
from tools.cli.arguments import parse_integer, parse_options
from tools.cli.command import exit_with, run_command
from tools.cli.errors import one_line_errors
from tools.cli.network_names import config_network_name
from tools.cli.paths import ROOT
from tools.cli.tables import write
from tools.search_spaces.space import Space, format_values, read_spaces

DEFAULTS = {
    "trials": "20", "metric": "", "direction": "", "sampler": "tpe", "sampler_seed": "0",
    "name": "",
}  # fmt: skip
CHOICES = {"direction": ("maximize", "minimize"), "sampler": ("tpe", "random")}
JOURNAL, SETTINGS = "journal.log", "search.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, or 2 after an error."""
    return run_command("search.py", __doc__, run_search, arguments, needs_arguments=True)


def run_search(arguments: Sequence[str]) -> None:
    """Search with the given arguments; errors of runs appear as run.py prints them."""
    options = [item for item in arguments if item.partition("=")[0] in DEFAULTS]
    with one_line_errors():
        search(
            [item for item in arguments if item not in options],
            parse_options(options, DEFAULTS, CHOICES),
        )


def search(words: Sequence[str], options: Mapping[str, str]) -> None:
    """Run trials until the requested number has finished.

    Raises:
        ValueError: A space or name is wrong, or another search has the same name.
    """
    try:
        import optuna
    except ImportError as error:
        raise ValueError(
            'search.py needs the package optuna: pip install "mixerlab[search]"'
        ) from error
    from filelock import FileLock, Timeout

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    spaces, fixed_words = read_spaces(words)
    trials = parse_integer("trials", options["trials"])
    folder, metric, direction = _open_folder(spaces, fixed_words, options)
    try:
        with FileLock(folder / "lock", timeout=0):
            study = _open_study(folder, direction, options)
            _requeue_interrupted(study)
            _run_trials(study, spaces, fixed_words, trials, metric, folder)
            _print_results(study, metric)
    except Timeout:
        raise ValueError(
            f"another process runs the search in {folder}; wait for it, or pass name=<another name>"
        ) from None


def _open_folder(
    spaces: Sequence[Space], fixed_words: Sequence[str], options: Mapping[str, str]
) -> tuple[Path, str, str]:
    """Check the first value of each space; return folder, metric and direction of the search."""
    from tools.config.config_checks import resolve_config
    from tools.config.overrides import read_command
    from tools.config.run_config import job_config
    from tools.runs.components import check_config

    read_command([*fixed_words, *(space.last for space in spaces)])
    command = read_command([*fixed_words, *(space.first for space in spaces)])
    config = check_config(resolve_config(job_config(command.words, command.config)))
    task, backbone = config.task_name, config_network_name(config.backbone)
    family = find_family(task)
    metric = options["metric"] or family.table_metric
    direction = options["direction"] or f"{family.direction(metric)}imize"
    searched = {space.key for space in spaces}
    usual = task if "backbone" in searched else f"{task}_{backbone}"
    searches = Path(config.output_dir) / "searches"
    folder = searches / (options["name"] or usual)
    if folder.resolve().parent != searches.resolve():
        raise ValueError(f"name={options['name']} must be the name of a folder, such as lr_search")
    settings = {
        "spaces": [str(space) for space in spaces], "fixed": sorted(fixed_words), "metric": metric,
        "direction": direction,
    }  # fmt: skip
    path = folder / SETTINGS
    if path.exists():
        before = read_json(path)
        before = before if isinstance(before, dict) else {}
        differ = [
            f"{key}: {before.get(key)} then, {value} now"
            for key, value in settings.items()
            if before.get(key) != value
        ]
        if differ:
            raise ValueError(
                f"{folder} has a search with other settings ({'; '.join(differ)}); pass the same "
                "settings to continue it, or name=<another name>"
            )
    else:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings, indent=2) + "\n")
    return folder, metric, direction


def _open_study(folder: Path, direction: str, options: Mapping[str, str]) -> Any:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend
    from optuna.study import StudyDirection

    directions = {"maximize": StudyDirection.MAXIMIZE, "minimize": StudyDirection.MINIMIZE}
    storage = JournalStorage(JournalFileBackend(str(folder / JOURNAL)))
    study = optuna.create_study(
        study_name=folder.name, storage=storage, direction=directions[direction],
        load_if_exists=True,
    )  # fmt: skip
    # The plain seed would draw the first trials again when a search continues.
    seed = parse_integer("sampler_seed", options["sampler_seed"], least=0) + len(study.trials)
    samplers = {"tpe": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}
    study.sampler = samplers[options["sampler"]](seed=seed)
    return study


def _requeue_interrupted(study: Any) -> None:
    """Queue the trials that were running when an earlier search was interrupted."""
    from optuna.trial import TrialState

    for trial in study.get_trials(states=[TrialState.RUNNING]):
        study.tell(trial.number, state=TrialState.FAIL)
        study.enqueue_trial(trial.params)


def _run_trials(
    study: Any,
    spaces: Sequence[Space],
    fixed_words: Sequence[str],
    trials: int,
    metric: str,
    folder: Path,
) -> None:
    from optuna.trial import TrialState

    failures = 0
    while (count := len(study.get_trials(states=[TrialState.COMPLETE]))) < trials:
        trial = study.ask({space.key: space.distribution() for space in spaces})
        values = format_values(spaces, trial.params)
        print(f"trial {trial.number} ({count + 1} of {trials}): {' '.join(values)}", flush=True)
        run = _run_trial([*fixed_words, *values], folder / f"trial_{trial.number:04d}.log")
        if run is None:
            study.tell(trial.number, state=TrialState.FAIL)
            failures += 1
            if failures == 3 and count == 0:
                raise ValueError(f"the first three trials failed; see the logs in {folder}")
            continue
        metrics = read_summary(run / "summary.json")["metrics"]
        if metric not in metrics:
            study.tell(trial.number, state=TrialState.FAIL)
            raise ValueError(
                f"metric {metric!r} is unknown to the runs; known: {', '.join(metrics)}"
            )
        trial.set_user_attr("folder", str(run))
        study.tell(trial.number, metrics[metric])
        print(f"  {metric} {metrics[metric]:.4g}  {run}", flush=True)


def _run_trial(overrides: Sequence[str], log: Path) -> Path | None:
    """Run one trial with the command that a user types; return its folder, or None if it failed."""
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


def _print_results(study: Any, metric: str) -> None:
    """Print the trials, best first, and the best settings as typed."""
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
