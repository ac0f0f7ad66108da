"""Train, evaluate or apply any registered backbone: python tools/run.py task=... backbone=...

python tools/run.py --help lists everything. From top to bottom: ``main`` reads a command, ``run``
does one run, ``run_by_hydra`` does the runs of a sweep.
"""

from __future__ import annotations

import logging
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # imports are written from the root
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from tools.cli.processes import is_first_process, prepare_process

if __name__ == "__main__":
    prepare_process()  # before torch is imported

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from tasks.engine.loops import signals
from tasks.engine.optimisation import automatic
from tasks.engine.quick_imports import quick_imports
from tasks.engine.run_folder.run_config import RunConfig
from tools.cli.command import exit_with
from tools.cli.errors import one_line_errors
from tools.cli.grammar import key_of
from tools.cli.paths import CONFIGS, ROOT
from tools.cli.printable import as_typed, escape_logs
from tools.config.config_checks import resolve_config
from tools.config.overrides import (
    JOB,
    Command,
    read_command,
    swept_keys,
    unlike_jobs,
    varied_keys,
)
from tools.config.run_config import job_config, log_differences
from tools.runs import folder as run_folder
from tools.runs import nodes
from tools.runs.garbage import freeze_heap
from tools.runs.process_group import following_first_process, processes

HELP = {"-h", "--help"}
SWEPT = "MIXERLAB_SWEPT"  # the options that the runs of a sweep differ in, for all its processes


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what a command says; a user's mistake ends in one line, a fault in a traceback.

    Returns:
        The exit status: 0, or 2 where runs of a sweep failed.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    with one_line_errors():
        if HELP & set(arguments):
            from tools.config.help import help_text

            print(as_typed(help_text([word for word in arguments if not word.startswith("-")])))
            return 0
        command = read_command(arguments)
        if command.form:
            text = OmegaConf.to_yaml(command.config, resolve=command.form == "resolved")
            print(automatic.comment_auto(text).rstrip())
            return 0
        if command.hydra:
            check_sweep(command.jobs)
            return run_by_hydra(command)
        sys.argv[1:] = command.words  # with which Lightning starts the other processes of a run
        logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stdout, force=True)
        escape_logs()
        run(resolve_config(job_config(command.words, command.config)))
        return 0


def check_sweep(jobs: Sequence[Sequence[str]]) -> None:
    """Refuse a sweep in which the settings of each run are wrong, before its first run.

    Raises:
        ValueError: The first run's mistake.
    """
    from tools.runs.components import check_settings

    mistakes = []
    for job in unlike_jobs(jobs):
        try:
            config = resolve_config(job_config(job))
            if config.mode == "fit":
                check_settings(config)
            return
        except ValueError as error:
            mistakes.append(error)
    if mistakes:
        raise mistakes[0]


def run(config: RunConfig, swept: Sequence[str] | None = None) -> None:
    """Train, evaluate or predict: build the parts in the order of the data flow, then work.

    Args:
        config: Config of the run, from ``config_checks.resolve_config``.
        swept: In a sweep the options that it varies, as they would be typed for this run alone.
    """
    if not is_first_process():
        logging.disable(logging.WARNING)  # the first process logs for all
    with signals.STOP.listening(), following_first_process(), nodes.NODES.joined():
        _run(config, swept)


def compared_with_paper(config: RunConfig, facts: dict[str, Any]) -> dict[str, Any]:
    """Return the comparison with the row of a paper that a run claims, for its summary."""
    if config.mode == "predict" or (config.mode == "fit" and not config.paper):
        return {}
    from tools.comparing.paper_figures import compare_with_row

    published = compare_with_row(config, facts)
    return {"paper": published} if published else {}


def _run(config: RunConfig, swept: Sequence[str] | None) -> None:
    with quick_imports():  # torch, Lightning and the toolkits: after the command is checked
        import tasks.engine.loading  # noqa: F401 - imported here, where it is quick
        from tools.runs import lock, report
        from tools.runs.components import build_components, check_config, execute
        from tools.runs.logger_setup import closing_loggers
        from tools.runs.outcome import explaining_full_memory, recording_failure
        from tools.runs.run_facts import collect_facts

        freeze_heap()
    if config.keep_memory:
        from tools.runs.freed_memory import keep_freed_memory

        keep_freed_memory()
    started = time.perf_counter()
    config = check_config(config)
    if config.mode != "fit":
        log_differences(config)
    resumed = new_length = None
    if config.resume:
        if nodes.NODES.rank == 0:
            resumed = run_folder.find_run_to_resume(config, sweep=swept is not None)
        resumed = nodes.NODES.share("resumed", resumed)
    if resumed:
        automatic.reuse_choices(config, resumed)
        run_folder.restore_start(config, resumed)
        new_length = run_folder.describe_new_length(resumed, config)
        run_folder.log_rounding(resumed, config)
    with run_folder.open_run_folder(config, resumed, swept or ()) as folder:
        if resumed and not new_length and report.log_finished(folder, config.trainer):
            return
        parts = build_components(config, folder, resumed=resumed is not None)
        if not resumed:
            run_folder.update_config(folder, config, resumed=False)
    with (
        run_folder.explaining_removal(folder),
        lock.acquire(folder, config.mode),
        recording_failure(folder),
        processes(parts.engine),
        closing_loggers(parts.engine.loggers),
        explaining_full_memory(config, folder),
    ):
        metrics = execute(parts, config, folder, new_length)
    if not parts.engine.is_global_zero:
        return
    with run_folder.explaining_removal(folder):
        facts = parts.facts | collect_facts(config, parts.engine, parts.datamodule)
        facts |= parts.task.summary_facts()
        facts |= {"metrics": metrics, "seconds": round(time.perf_counter() - started, 1)}
        facts |= compared_with_paper(config, facts)
        task = parts.task.to(parts.engine.strategy.root_device)
        report.write(folder, facts, task, parts.datamodule)
        if config.report:
            from tools.analyses.page import write_page

            write_page(folder)


def run_by_hydra(command: Command) -> int:
    """Let Hydra answer its own flags or do the runs of a sweep, which ends with its table."""
    from tools.comparing.sweep_table import SweepOutcomes, show_table

    os.environ[SWEPT] = " ".join(varied_keys(command.words))
    SweepOutcomes.latest = []
    sys.argv[1:] = command.hydra_arguments()
    run_job()
    outcomes = SweepOutcomes.latest
    if outcomes:
        show_table(outcomes, swept_keys(command.words))
    failed = [outcome["failed"] for outcome in outcomes if outcome["failed"]]
    if failed:
        print(f"error: of the sweep {len(failed)} failed: {'; '.join(failed)}", file=sys.stderr)
    return 2 if failed else 0


@hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="run")
def run_job(config: DictConfig) -> dict[str, str | None]:
    """Do one run of a sweep, whose words Hydra passes as one option.

    Returns:
        Its folder, if it has one, and the command of one that failed.
    """
    words = shlex.split(config[JOB])
    sweep = HydraConfig.get().mode == RunMode.MULTIRUN
    swept = None
    # With this command Lightning starts the other processes of this one run, also where a launcher
    # has the run in a process of its own.
    sys.argv[:] = [str(ROOT / "tools" / "run.py"), *words]
    if sweep:
        varied = os.environ.get(SWEPT, "").split()
        swept = [word for word in words if key_of(word) in varied]
        sys.modules["__main__"].__spec__ = None
        os.environ.pop(run_folder.ENVIRONMENT, None)  # the folder of the run before
    failed = None
    try:
        with one_line_errors():
            run(resolve_config(job_config(words)), swept)
    except SystemExit as ended:
        # A sweep continues after a mistake, as Hydra does after a fault; a signal ends it.
        if not sweep or ended.code != 2:
            raise
        failed = shlex.join(words)
    folder = os.environ.get(run_folder.ENVIRONMENT)
    return {"folder": folder if folder and Path(folder).is_dir() else None, "failed": failed}


if __name__ == "__main__":
    exit_with(main, writes_files=not HELP & set(sys.argv))
