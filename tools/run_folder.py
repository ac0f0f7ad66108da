"""The folder of a run: created once, found again for resuming, and what a checkpoint means."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

ENVIRONMENT = "MIXERLAB_RUN_FOLDER"  # how Lightning's other processes learn the folder of the first
LATEST = "latest"
CONFIG = "config.yaml"
# Options that a run and its continuation may differ in: they do not change what is computed.
FREE_ON_RESUME = {
    "callbacks.device",
    "callbacks.gradient_norm",
    "callbacks.learning_rate",
    "callbacks.top_k",
    "ckpt",
    "data.num_workers",
    "data.root",
    "input",
    "output_dir",
    "resume",
    "trainer.accelerator",
    "trainer.log_every_n_steps",
    "trainer.profiler",
}
# Of these groups every option.
FREE_GROUPS = ("logger.", "paper.")


@contextlib.contextmanager
def opened(config: Mapping[str, Any]) -> Iterator[Path]:
    """The run folder of a config: a new one with its config.yaml, or the one to go on with.

    A new folder is removed again if the block, which is to prepare the run, fails, and with it the
    folders around it that were made for it and hold nothing else.

    Raises:
        ValueError: It cannot be made, or the run to resume does not exist or had other settings.
    """
    parent = Path(config["output_dir"]) / config["task_name"] / config["backbone"]["name"]
    new = is_first_process() and not config["resume"]
    absent = [path.absolute() for path in (parent, *parent.parents) if not path.exists()]
    if config["resume"]:
        folder = folder_to_resume(config["ckpt"], parent)
        check_same_config(folder, config)
    elif new:
        folder = new_run_folder(parent, config["mode"])
        (folder / CONFIG).write_text(yaml.safe_dump(dict(config), sort_keys=False))
    else:
        folder = Path(os.environ.get(ENVIRONMENT, parent))  # only the first process writes
    folder = folder.resolve()
    os.environ[ENVIRONMENT] = str(folder)
    try:
        yield folder
    except BaseException:
        if new:
            (folder / CONFIG).unlink()
            folder.rmdir()
            with contextlib.suppress(OSError):  # by now another run may have its folder there
                for path in absent:
                    path.rmdir()
        raise


def is_first_process() -> bool:
    """Whether this is rank 0 under torchrun or SLURM, or the process that was typed."""
    return all(int(os.environ.get(name, 0)) == 0 for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK"))


def new_run_folder(parent: Path, mode: str) -> Path:
    """Create ``parent/<stamp>``, or ``<stamp>_<mode>`` for an evaluation.

    Two runs in one second stay apart, also those of two machines.

    Raises:
        ValueError: The folder cannot be created.
    """
    stamp = datetime.now().astimezone().strftime("%Y-%m-%d_%H-%M-%S")
    stamp += "" if mode == "fit" else f"_{mode}"
    for attempt in itertools.count():
        folder = parent / (stamp if attempt == 0 else f"{stamp}_{attempt}")
        try:
            folder.mkdir(parents=True)
            break
        except OSError as error:
            if isinstance(error, FileExistsError) and folder.is_dir():
                continue
            raise ValueError(
                f"no run folder can be made in {parent} ({error}); "
                "pass output_dir=<a writable folder>"
            ) from error
    return folder


def mark_latest(folder: Path) -> None:
    """Let ``latest`` beside the run folder lead to it."""
    if not is_first_process():
        return
    temporary = folder.parent / f".{LATEST}-{os.getpid()}"
    temporary.symlink_to(folder.name)
    temporary.replace(folder.parent / LATEST)


def checkpoint_file(path: str | Path, name: str = "best.ckpt") -> Path:
    """The checkpoint that a path means: a file, or a run folder's ``checkpoints/<name>``.

    Raises:
        ValueError: Neither exists.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        inside = path / "checkpoints" / name
        if not inside.is_file():
            raise ValueError(f"{path} is no run folder with a checkpoint: there is no {inside}")
        return inside
    if not path.is_file():
        raise ValueError(f"there is no checkpoint or run folder at {path}")
    return path


def folder_to_resume(ckpt: str | None, parent: Path) -> Path:
    """The run folder to go on with: the one ``ckpt`` lies in, or the latest one.

    Raises:
        ValueError: There is none.
    """
    latest = parent / LATEST
    if ckpt is None and not latest.exists():
        raise ValueError(
            f"there is no run to resume in {parent}; start one without resume=true, "
            "or pass ckpt=<run folder>"
        )
    folder = checkpoint_file(ckpt or latest, "last.ckpt").resolve().parent.parent
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} is no run folder (it has no {CONFIG}), so it cannot be resumed")
    return folder


def check_same_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse to resume a run with other settings than it began with.

    Raises:
        ValueError: Names the settings that differ, with both values.
    """
    before = flatten(yaml.safe_load((folder / CONFIG).read_text()))
    now = flatten(config)
    differ = [
        f"{key}: {before.get(key)} then, {now.get(key)} now"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and not may_differ(key)
    ]
    if differ:
        raise ValueError(
            f"{folder} was trained with other settings ({'; '.join(differ[:6])}); "
            "pass the same ones to resume it, or start a new run"
        )


def may_differ(key: str) -> bool:
    """Whether an option, by its dotted name, changes nothing of what a run computes."""
    return key in FREE_ON_RESUME or key.partition(".")[0] + "." in FREE_GROUPS


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Settings by their dotted names."""
    if not isinstance(config, Mapping):
        return {prefix: list(config) if isinstance(config, tuple) else config}
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return flat
