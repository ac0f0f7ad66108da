"""Train, evaluate or apply any registered backbone: python tools/run.py task=... backbone=...

python tools/run.py --help says what there is. No line here asks which task it is.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # python puts tools/ there; imports are written from the root

# OpenMP's threads spin while they wait, and then one busy neighbour process makes every parallel
# region wait for it; asleep they take long to wake. So they spin briefly: a step of DeiT-T at 64
# pixels on two cores takes 0.11 s (0.10 spinning, 0.21 asleep), beside a second one 0.30 s (0.50,
# 0.20).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import hydra  # noqa: E402
from hydra.core.hydra_config import HydraConfig  # noqa: E402
from hydra.types import RunMode  # noqa: E402
from omegaconf import DictConfig  # noqa: E402

from tools.command_line import overrides as command_line  # noqa: E402
from tools.command_line.errors import one_line_errors  # noqa: E402
from tools.running import config as run_config  # noqa: E402
from tools.running import help as run_help  # noqa: E402
from tools.running import sweeps  # noqa: E402
from tools.running.folder import ENVIRONMENT  # noqa: E402
from tools.running.processes import check_trainer, is_first_process  # noqa: E402

SWEPT = "MIXERLAB_SWEPT"  # the options that the runs of a sweep differ in, for all its processes


def run(config: dict[str, Any], swept: Sequence[str] | None = None) -> None:
    """Build the parts in the order of the data flow, then train, evaluate or predict.

    Args:
        config: Of the run, from ``command_line.resolved``.
        swept: In a sweep what it varies, as it would be typed for this run alone.
    """
    import lightning.pytorch as lightning

    from tasks.loading import build_task
    from tools.comparing.paper_figures import compared
    from tools.running import facts as run_facts
    from tools.running import folder as run_folder
    from tools.running import lock as run_lock
    from tools.running import prediction, report, resume, trainer
    from tools.running.loggers import closing
    from tools.running.outcome import failure_noted
    from tools.running.process_group import processes

    check_options(config)
    check_trainer(config["trainer"])
    started = time.perf_counter()
    mode = config["mode"]
    if mode != "fit":
        run_config.say_origin(config)
    resumed = run_folder.to_resume(config, sweep=swept is not None) if config["resume"] else None
    other_length = run_folder.other_length(resumed, config) if resumed else None
    with run_folder.opened(config, resumed, swept or ()) as folder:
        if resumed and not other_length and report.say_finished(folder):
            return
        lightning.seed_everything(config["seed"], workers=True, verbose=False)
        datamodule = data_of(config)
        task = build_task(config, datamodule)
        if mode != "fit":
            task.load_weights(config["ckpt"])
        start = None
        if resumed:
            start = resume.find_start(folder, config["ckpt"], task, config["trainer"])
        facts = report.facts(config, task.model)
        training = mode == "fit"
        extras = trainer.extras(config, folder, task) if training else {}
        engine = trainer.make_trainer(
            config["trainer"],
            folder,
            task.monitor,
            training=training,
            checkpoint_every=config["checkpoint_every"],
            **extras,
        )

    with (
        run_folder.kept(folder),
        run_lock.held(folder, mode),
        failure_noted(folder),
        processes(engine),
        closing(engine.loggers),
    ):
        if mode == "fit":
            run_folder.mark_latest(folder)
            report.announce(facts, config, datamodule, engine.world_size)
            if start:
                resume.announce(start, other_length)
                run_folder.keep_config(folder, config)
                report.reopen(folder)
            metrics = trainer.fit(engine, task, datamodule, start=start)
        elif mode == "predict":
            metrics = prediction.predict(engine, task, datamodule)
        else:
            metrics = trainer.evaluate(engine, mode, task, datamodule)
    if not engine.is_global_zero:
        return
    with run_folder.kept(folder):
        facts |= run_facts.of_run(config, engine, datamodule)
        facts |= {"metrics": metrics, "seconds": round(time.perf_counter() - started, 1)}
        beside = compared(config, facts) if mode != "predict" else None
        facts |= {"paper": beside} if beside else {}
        report.write(folder, facts, task.to(engine.strategy.root_device), datamodule)


def check_options(config: dict[str, Any]) -> None:
    """Refuse options that no part takes before anything is built."""
    from backbones import create_backbone
    from backbones.options import check_arguments, check_complete
    from tasks.optim import build_optimizer, learning_rate_factor

    for group, call in (
        ("backbone", create_backbone),
        ("optimizer", build_optimizer),
        ("schedule", learning_rate_factor),
    ):
        check_complete(call, config[group], group)
        check_arguments(call, config[group], group)


def data_of(config: dict[str, Any]) -> Any:
    """The datamodule of a run, all of whose files are looked at before a training."""
    from tasks.instantiate import build
    from tools.running import prediction

    datamodule = build(config, "data", seed=config["seed"], predict_path=config["input"])
    if prediction.needs_no_data(config, datamodule):
        return datamodule
    datamodule.prepare_data()
    datamodule.setup()
    if config["mode"] == "fit" and is_first_process():
        datamodule.check_files()
    return datamodule


@hydra.main(version_base="1.3", config_path=str(ROOT / "configs"), config_name="run")
def main(config: DictConfig) -> dict[str, str | None]:
    """Run one composed config; a user's mistake ends in one line, a fault in a traceback.

    Returns:
        Of a sweep's run its folder, if it has one, and the command of one that failed.
    """
    typed = HydraConfig.get().overrides.task
    sweep = HydraConfig.get().mode == RunMode.MULTIRUN
    swept = None
    if sweep:
        varied = os.environ.get(SWEPT, "").split()
        given = run_config.as_typed(typed)
        swept = [item for item in given if item.partition("=")[0].lstrip("+~") in varied]
        # Lightning starts further processes by this command, which has to be that of one run, also
        # where a launcher has it in a process of its own.
        sys.argv[:] = [str(ROOT / "tools" / "run.py"), *typed]
        sys.modules["__main__"].__spec__ = None
        os.environ.pop(ENVIRONMENT, None)  # the folder of the run before
    if not is_first_process():
        logging.disable(logging.WARNING)
    failed = None
    try:
        with one_line_errors():
            run(command_line.resolved(run_config.job_config(typed, config)), swept)
    except SystemExit as ended:
        # A sweep goes on after a mistake, as Hydra has it do after a fault; a signal ends it.
        if not sweep or ended.code != 2:
            raise
        failed = " ".join(run_config.as_typed(typed))
    folder = os.environ.get(ENVIRONMENT)
    return {"folder": folder if folder and Path(folder).is_dir() else None, "failed": failed}


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # names of files need not be UTF-8
    with one_line_errors():
        typed_here = sys.argv[1:]
        subject = run_help.subject_of(typed_here)
        if subject is not None:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a closed pipe, as behind head
            print(run_help.text(subject))
            sys.exit()
        sys.argv[1:] = prepared = command_line.prepare(typed_here)
        os.environ[SWEPT] = " ".join(command_line.varied(prepared))
    outcomes = sweeps.outcomes_of(main)
    if outcomes:
        with one_line_errors():
            sweeps.show_table(outcomes, command_line.swept(prepared))
    failed = [outcome["failed"] for outcome in outcomes if outcome["failed"]]
    if failed:
        print(f"error: of the sweep {len(failed)} failed: {'; '.join(failed)}", file=sys.stderr)
        sys.exit(2)
