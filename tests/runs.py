"""Runs small enough for a test, within this process or as the command that a user types."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from logging import StreamHandler, getLogger
from pathlib import Path

import psutil
import torch
import yaml
from hydra.core.global_hydra import GlobalHydra

from tasks.engine.run_folder.run_config import RunConfig
from tools.cli.errors import one_line_errors
from tools.cli.paths import CONFIGS, ROOT
from tools.config import run_config as run_config
from tools.config.config_checks import resolve_config
from tools.config.lazy_groups import register_groups
from tools.config.overrides import read_command
from tools.run import run

SCENES = ("data.num_train=6", "data.num_val=3", "data.scene_size=64", "data.batch_size=2")
# A few steps of 64 pixels for each task; ++ as the sample files may or may not name an option.
TINY = {
    "classification": ("++data.digits_per_class=4", "++data.train_copies=1", "data.batch_size=8"),
    "transfer": ("++data.train_per_class=1", "++data.val_per_class=1", "data.batch_size=20"),
    # A second stage of few RoIs and narrow layers, with 12 of 13 million weights less.
    "detection": (
        *SCENES, "head.num_rois=16", "head.num_proposals=30",
        "++head.options={roi_head:{bbox_head:{fc_out_channels:64},"
        "mask_head:{num_convs:1,conv_out_channels:32}}}",
    ),
    "segmentation": (*SCENES, "head.channels=64"),
}  # fmt: skip
# Words of the smallest run of each family, with all that it computes.
SMALLEST = {
    "classification": ("backbone=resnet18", *TINY["classification"]),
    "transfer": ("backbone=resnet18", "backbone.pretrained=false", *TINY["transfer"]),
    "detection": ("backbone=resnet18", *TINY["detection"]),
    "segmentation": ("backbone=resnet18", *TINY["segmentation"]),
    "super_resolution": (
        "backbone=edsr_baseline", "data.scale=2", "data.patch_size=8", "data.patches_per_image=1",
        "data.batch_size=4",
    ),
    "forecasting": (
        "backbone=ffnet_1d", "backbone.dim=8", "backbone.expansion=2", "data.hours=600",
        "data.lookback=24", "data.horizon=12", "data.batch_size=64",
        "head.quantiles=[0.1,0.5,0.9]",
    ),
    "point_segmentation": (
        "backbone=ffnet_3d_tiny", "data.num_train=3", "data.num_val=2", "data.density=30",
        "data.grid_size=0.15", "data.crop_points=1500",
    ),
    "generation": (
        "backbone=dit_tiny", "head.steps=2", "task.num_samples=4", "data.eval_batch_size=8",
    ),
    "glue": ("backbone=bert_tiny", "data.num_train=64", "data.num_val=21"),
    "multi_label": ("backbone=resnet18", "data.num_train=32", "data.num_val=16"),
}  # fmt: skip
# One run of a sweep or search.
SHORTEST = ("task=classification", "trainer=cpu", *TINY["classification"], "trainer.max_epochs=1",
            "trainer.limit_train_batches=1", "schedule.warmup=0", "logger=csv")  # fmt: skip
# Options of a Trainer that only computes.
QUIET = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False,
         "enable_progress_bar": False, "enable_model_summary": False}  # fmt: skip
# What a task that is not trained needs.
RECIPE = {"optimizer": {"name": "sgd", "lr": 0.1}, "schedule": {"name": "constant"}}


@dataclass
class Ended:
    """Status and output of a finished run."""

    status: int
    out: str
    err: str

    def folder(self) -> Path:
        """The run folder, which is the last thing that a run prints."""
        return ROOT / self.out.strip().splitlines()[-1].removeprefix("Run folder: ")


def arguments(task, output_dir, *more, backbone="deit_t", trainer="cpu", epochs=1):
    """The options of a tiny run."""
    options = (f"task={task}", f"backbone={backbone}", f"trainer={trainer}", *TINY[task])
    return [*options, f"output_dir={output_dir}", f"trainer.max_epochs={epochs}",
            "schedule.warmup=0", *more]  # fmt: skip


def single_words(typed):
    """Return words of which a later one replaces an earlier one of the same option."""
    return list({word.partition("=")[0].lstrip("+"): word for word in typed}.values())


def options(group):
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


register_groups()


def composed(*overrides):
    config = run_config.job_config(overrides)
    config["backbone"]["pretrained"] = False  # that transfer asks for one is tested elsewhere
    return resolve_config(config)


def _status_of(typed) -> int:
    try:
        with one_line_errors():
            given = read_command(typed)
            run(resolve_config(run_config.job_config(given.words, given.config)))
    except SystemExit as ended:
        return ended.code
    finally:
        GlobalHydra.instance().clear()
    return 0


def run_here(typed, capsys) -> Ended:
    """Do the same as ``python tools/run.py`` in this process."""
    capsys.readouterr()
    status = _status_of(typed)
    captured = capsys.readouterr()
    return Ended(status, captured.out, captured.err)


def completed(typed, capsys) -> Ended:
    """Run to a successful end in this process."""
    ended = run_here(typed, capsys)
    assert ended.status == 0, ended.err
    return ended


def run_shared(typed) -> Ended:
    """The same for a run that several tests share: lines as printed, and one thread."""
    out, err = io.StringIO(), io.StringIO()
    root, threads = getLogger(), torch.get_num_threads()
    lines, level = StreamHandler(out), root.level  # as hydra/job_logging=stdout
    root.addHandler(lines)
    root.setLevel("INFO")
    torch.set_num_threads(1)
    try:
        with redirect_stdout(out), redirect_stderr(err):
            status = _status_of(typed)
    finally:
        torch.set_num_threads(threads)
        root.setLevel(level)
        root.removeHandler(lines)
    return Ended(status, out.getvalue(), err.getvalue())


def refused(typed, output_dir, capsys) -> str:
    """The one line that a command ends with, after which nothing is left."""
    ended = run_here(typed, capsys)
    assert ended.status == 2, ended
    assert ended.err.startswith("error: "), ended.err
    assert not [path for path in output_dir.rglob("*") if not path.is_dir()]
    assert not [path for path in output_dir.rglob("2*")]  # no run folder
    return ended.err


def start(typed, **options) -> subprocess.Popen:
    """Start ``python tools/run.py`` as a user would, in a process of its own.

    ``script`` stands in for it.
    """
    script = options.pop("script", ROOT / "tools" / "run.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    return subprocess.Popen(
        [sys.executable, str(script), *typed],
        env=environment,
        cwd=options.pop("cwd", ROOT),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell without job control has its background jobs, and theirs, ignore Ctrl-C.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        **options,
    )


def wait_for(process, condition):
    """Wait until a process that is still running fulfils a condition."""
    until = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.02)


def command(typed, timeout=240, **options) -> Ended:
    """Run ``python tools/run.py`` to its end."""
    process = start(typed, **options)
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return Ended(process.returncode, out, err)


def write_run(folder, config, content=None):
    """Write a run folder with a config and a checkpoint, which is empty without content."""
    (folder / "checkpoints").mkdir(parents=True)
    plain = config.plain() if isinstance(config, RunConfig) else config
    text = config if isinstance(config, str) else yaml.safe_dump(plain, sort_keys=False)
    (folder / "config.yaml").write_text(text)
    best = folder / "checkpoints" / "best.ckpt"
    best.touch() if content is None else torch.save(content, best)
    return folder


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def weights(folder, name="last"):
    path = folder / "checkpoints" / f"{name}.ckpt"
    return torch.load(path, weights_only=True)["state_dict"]


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def session_processes(session):
    """Return the numbers of the living processes of a session."""
    numbers = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                numbers.append(process.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return numbers
