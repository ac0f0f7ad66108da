"""Train, evaluate or apply any registered backbone: python tools/run.py task=... backbone=...

python tools/run.py --help says what there is. No line here asks which task it is.
"""

from __future__ import annotations

import io
import logging
import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # python puts tools/ there; imports are written from the root

from tools.cli.processes import (  # noqa: E402
    check_trainer,
    end_with_parent,
    is_child_process,
    is_first_process,
)

if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while importing needs no traceback
    if is_child_process():
        end_with_parent(signal.SIGTERM)  # until ``following_first``

# OpenMP's threads spin while they wait, and then one busy neighbour process makes every parallel
# region wait for it; asleep they take long to wake. So they spin briefly: a step of DeiT-T at 64
# pixels on two cores takes 0.11 s (0.10 spinning, 0.21 asleep), beside a second one 0.30 s (0.50,
# 0.20).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import hydra  # noqa: E402
from hydra.core.hydra_config import HydraConfig  # noqa: E402
from hydra.types import RunMode  # noqa: E402
from omegaconf import DictConfig, OmegaConf  # noqa: E402

from tasks.engine import signals  # noqa: E402
from tools.cli.command import exit_with  # noqa: E402
from tools.cli.errors import one_line_errors  # noqa: E402
from tools.cli.printable import escape_logs  # noqa: E402
from tools.config import automatic  # noqa: E402
from tools.config.config_checks import resolve_config  # noqa: E402
from tools.config.help import FLAGS, help_text, help_words  # noqa: E402
from tools.config.overrides import read_command, swept_keys, varied_keys  # noqa: E402
from tools.config.run_config import (  # noqa: E402
    is_evaluation,
    job_config,
    log_differences,
    restore_removals,
    strip_forced,
)
from tools.runs.folder import (  # noqa: E402
    ENVIRONMENT,
    keep_config,
    keep_start,
    kept,
    opened,
    other_length,
    to_resume,
)
from tools.runs.freed_memory import keep_freed_memory  # noqa: E402
from tools.runs.garbage import keep_imports, uncollected  # noqa: E402

SWEPT = "MIXERLAB_SWEPT"  # the options that the runs of a sweep differ in, for all its processes


def run(config: dict[str, Any], swept: Sequence[str] | None = None) -> None:
    """Build the parts in the order of the data flow, then train, evaluate or predict.

    Args:
        config: Of the run, from ``config_checks.resolve_config``.
        swept: In a sweep what it varies, as it would be typed for this run alone.
    """
    with signals.STOP.listening():
        with uncollected():
            from tools.runs.process_group import following_first
        with following_first():
            _run(config, swept)


def _run(config: dict[str, Any], swept: Sequence[str] | None) -> None:
    with uncollected():
        from tasks.engine.instantiate import with_whole_numbers
        from tasks.engine.loading import check_options
        from tools.analyses.page import write_page
        from tools.comparing.paper_figures import compared
        from tools.runs import lock, report
        from tools.runs.components import build_parts, work
        from tools.runs.logger_setup import closing
        from tools.runs.outcome import failure_noted
        from tools.runs.process_group import processes
        from tools.runs.run_facts import of_run

        keep_imports()
    if config["keep_memory"]:
        keep_freed_memory()
    started = time.perf_counter()
    check_options(automatic.apply_fixed_schedule(config))
    config |= {group: with_whole_numbers(config, group) for group in ("data", "head", "task")}
    check_trainer(config["trainer"])
    if config["mode"] != "fit":
        log_differences(config)
    resumed = to_resume(config, sweep=swept is not None) if config["resume"] else None
    if resumed:
        automatic.reuse_choices(config, resumed)
        keep_start(config, resumed)
    new_length = other_length(resumed, config) if resumed else None
    with opened(config, resumed, swept or ()) as folder, uncollected():
        if resumed and not new_length and report.say_finished(folder):
            return
        parts = build_parts(config, folder, resumed=resumed is not None)
        if not resumed:
            keep_config(folder, config)
    engine = parts.engine
    with (
        kept(folder),
        lock.held(folder, config["mode"]),
        failure_noted(folder),
        processes(engine),
        closing(engine.loggers),
    ):
        metrics = work(parts, config, folder, new_length)
    if not engine.is_global_zero:
        return
    with kept(folder):
        facts = parts.facts | of_run(config, engine, parts.datamodule)
        facts |= {"metrics": metrics, "seconds": round(time.perf_counter() - started, 1)}
        beside = compared(config, facts) if config["mode"] != "predict" else None
        facts |= {"paper": beside} if beside else {}
        task = parts.task.to(engine.strategy.root_device)
        report.write(folder, facts, task, parts.datamodule)
        if config["report"]:
            write_page(folder)


@hydra.main(version_base="1.3", config_path=str(ROOT / "configs"), config_name="run")
def job(config: DictConfig) -> dict[str, str | None]:
    """Run what Hydra composed: one run of a sweep, or one with options of Hydra's own.

    Returns:
        Its folder, if it has one, and the command of one that failed.
    """
    typed = restore_removals(HydraConfig.get().overrides.task)
    sweep = HydraConfig.get().mode == RunMode.MULTIRUN
    swept = None
    if sweep:
        varied = os.environ.get(SWEPT, "").split()
        given = strip_forced(typed)
        swept = [item for item in given if item.partition("=")[0].lstrip("+~") in varied]
        # Lightning starts further processes by this command, which has to be that of one run, also
        # where a launcher has it in a process of its own.
        sys.argv[:] = [str(ROOT / "tools" / "run.py"), *typed]
        sys.modules["__main__"].__spec__ = None
        os.environ.pop(ENVIRONMENT, None)  # the folder of the run before
    say_once()
    failed = None
    try:
        with one_line_errors():
            ours = is_evaluation(typed) or any(one.startswith("~") for one in typed)
            run(resolve_config(job_config(typed, None if ours else config)), swept)
    except SystemExit as ended:
        # A sweep goes on after a mistake, as Hydra has it do after a fault; a signal ends it.
        if not sweep or ended.code != 2:
            raise
        failed = shlex.join(strip_forced(typed))
    folder = os.environ.get(ENVIRONMENT)
    return {"folder": folder if folder and Path(folder).is_dir() else None, "failed": failed}


def say_once() -> None:
    """Leave what is said of a run to its first process."""
    if not is_first_process():
        logging.disable(logging.WARNING)


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what a command says; a user's mistake ends in one line, a fault in a traceback.

    Returns:
        The exit status: 0, or 2 where runs of a sweep failed.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of files need not be UTF-8
    with one_line_errors():
        subject = help_words(arguments)
        if subject is not None:
            print(help_text(subject))
            return 0
        with uncollected():
            command = read_command(arguments)
        if command.shown:
            text = OmegaConf.to_yaml(command.config, resolve=command.shown == "resolved")
            print(automatic.comment_auto(text).rstrip())
            return 0
        sys.argv[1:] = command.arguments  # by which Lightning starts the other processes of a run
        if command.config is not None:
            logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stdout, force=True)
            escape_logs()
            say_once()
            run(resolve_config(job_config(command.overrides, command.config)))
            return 0
        os.environ[SWEPT] = " ".join(varied_keys(command.arguments))
    return by_hydra(command.arguments)


def by_hydra(arguments: Sequence[str]) -> int:
    """Leave a command to Hydra: a sweep, which ends with its table, or Hydra's own flags."""
    from tools.comparing import sweep_table

    outcomes = sweep_table.outcomes_of(job)
    if outcomes:
        with one_line_errors():
            sweep_table.show_table(outcomes, swept_keys(arguments))
    failed = [outcome["failed"] for outcome in outcomes if outcome["failed"]]
    if failed:
        print(f"error: of the sweep {len(failed)} failed: {'; '.join(failed)}", file=sys.stderr)
    return 2 if failed else 0


if __name__ == "__main__":
    exit_with(main, writes_files=not FLAGS & set(sys.argv))
