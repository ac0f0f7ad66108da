"""Run folders: create a new one, or find the one to resume."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from tasks.engine.optimisation.automatic import AUTO, CHOSEN, MEASURED, TAKEN, is_automatic
from tasks.engine.optimisation.schedule_rule import RATE, REFERENCE
from tasks.engine.run_folder.atomic_writes import write_whole
from tasks.engine.run_folder.run_config import RunConfig
from tasks.engine.run_folder.saved_runs import CONFIG, read_config
from tasks.engine.run_folder.source_copies import check_sources
from tools.cli.nested_config import flatten
from tools.cli.network_names import config_network_name
from tools.cli.processes import is_first_process
from tools.runs import lock
from tools.runs.nodes import NODES

log_info = logging.getLogger(__name__).info

ENVIRONMENT = "MIXERLAB_RUN_FOLDER"  # passes the folder of the first process to Lightning's others
LATEST = "latest"
# Options that may change when a run is resumed, since results do not depend on them.
FREE_ON_RESUME = {
    "callbacks.device",
    "callbacks.gradient_norm",
    "callbacks.learning_rate",
    "callbacks.top_k",
    "checkpoint_every",
    "ckpt",
    "data.eval_batch_size",
    "data.num_workers",
    "backbone.fast",
    "backbone.grad_checkpointing",
    "report",
    "data.root",
    "input",
    "keep_memory",
    "output_dir",
    "overrides",
    "resume",
    "task.check_patches",
    "trainer.accelerator",
    "trainer.benchmark",
    "trainer.compile",
    "trainer.enable_progress_bar",
    "trainer.log_every_n_steps",
    "trainer.max_time",
    "trainer.profiler",
}
# Groups whose options may all change.
FREE_GROUPS = ("logger", "paper", "choices", CHOSEN)
# Files that a run starts from. If a file has moved, its new path is accepted.
START = "backbone.pretrained"
TEACHER = "task.distillation.checkpoint"
# Length of the training, which may change on resuming.
LENGTH = {"trainer.max_epochs", "trainer.max_steps"}
# The direction of early stopping is derived where there is patience.
STOPPING = "callbacks.early_stopping"
PATIENCE = f"{STOPPING}.patience"
# Ways to compute the same, with other roundings.
ROUNDS = ("trainer.accelerator", "trainer.compile")
# Files that a finished run keeps, which may also change.
AT_END = {"checkpoints"}
# Options of the command rather than the run.
OF_A_COMMAND = {"ckpt", "input", "output_dir", "overrides", "resume"}


@contextlib.contextmanager
def open_run_folder(
    config: RunConfig, resumed: Path | None = None, swept: Sequence[str] = ()
) -> Iterator[Path]:
    """Open the run folder of a config: a new one with its config.yaml, or the one to resume.

    If the block, which prepares the run, fails, a new folder is removed again, along with new
    empty parents.

    Args:
        config: Config of the run.
        resumed: The folder to resume, from ``find_run_to_resume``.
        swept: Options and values that a sweep varies, for the folder's name.

    Raises:
        ValueError: The folder cannot be created.
    """
    parent = _parent(config)
    is_new = is_first_process() and resumed is None
    absent = [path.absolute() for path in (parent, *parent.parents) if not path.exists()]
    if resumed is not None:
        folder = resumed
    elif is_new:
        folder = new_run_folder(parent, config.mode, swept)
    else:
        folder = Path(os.environ.get(ENVIRONMENT, parent))  # only the first process writes
    folder = NODES.share("folder", folder.resolve()) or folder
    os.environ[ENVIRONMENT] = str(folder)
    try:
        if is_new:
            write_whole(folder / CONFIG, yaml.safe_dump(config.plain(), sort_keys=False))
        yield folder
    except BaseException:
        if is_new:
            (folder / CONFIG).unlink(missing_ok=True)
            folder.rmdir()
            with contextlib.suppress(OSError):  # another run may have its folder there by now
                for path in absent:
                    path.rmdir()
        raise


@contextlib.contextmanager
def explaining_removal(folder: Path) -> Iterator[None]:
    """Replace the errors of a run by one that explains that its folder was removed.

    Raises:
        ValueError: The folder was removed.
    """
    hook = threading.excepthook

    def ignore_write_errors(failed: threading.ExceptHookArgs) -> None:
        # TensorBoard writes from its own thread, and logs the error at the next write.
        if not issubclass(failed.exc_type, OSError):
            hook(failed)

    threading.excepthook = ignore_write_errors
    try:
        yield
    except Exception as error:
        if (folder / CONFIG).exists():
            raise
        raise ValueError(
            f"the run folder {folder} was removed or moved while the run was writing to it, so "
            "the run stops; start it again"
        ) from error
    finally:
        threading.excepthook = hook


def new_run_folder(parent: Path, mode: str, swept: Sequence[str] = ()) -> Path:
    """Create ``parent/<stamp>``; evaluations append ``_<mode>``, sweeps options (``_seed-1``).

    Runs started in the same second get different folders, also on several machines.

    Raises:
        ValueError: The folder cannot be created.
    """
    stamp = datetime.now().astimezone().strftime("%Y-%m-%d_%H-%M-%S")
    stamp += "" if mode == "fit" else f"_{mode}"
    if swept:
        # Without characters that Hydra would need quoted in ckpt=<folder>.
        stamp += "_" + "_".join(re.sub(r"[^\w.]+", "-", item).strip("-") for item in swept)[:80]
    for attempt in itertools.count():
        folder = parent / (stamp if attempt == 0 else f"{stamp}_{attempt}")
        try:
            folder.mkdir(parents=True)
            break
        except OSError as error:
            if isinstance(error, FileExistsError) and folder.is_dir():
                continue
            raise ValueError(
                f"cannot create a run folder in {parent} ({error}); "
                "pass output_dir=<a writable folder>"
            ) from error
    return folder


def mark_latest(folder: Path) -> None:
    """Point the link ``latest``, beside the run folder, to it."""
    if not is_first_process():
        return
    latest = folder.parent / LATEST
    if os.path.lexists(latest) and not latest.is_symlink():
        log_info(f"{latest} is not a link to a run and stays unchanged; remove or rename it")
        return
    temporary = folder.parent / f".{LATEST}-{os.getpid()}"
    temporary.symlink_to(folder.name)
    temporary.replace(latest)


def find_run_to_resume(config: RunConfig, *, sweep: bool = False) -> Path | None:
    """Find the run folder to resume: the one of ``ckpt``, or the newest with these settings.

    Return None for a job of a sweep that has not started.

    Raises:
        ValueError: No run fits, its settings differ, or it is being trained now.
    """
    parent = _parent(config)
    if config.ckpt is not None:
        folder = _find_run_folder(Path(config.ckpt).expanduser())
        check_same_config(folder, config)
        return _check_free(folder)
    if not is_first_process() and os.environ.get(ENVIRONMENT):
        folder = Path(os.environ[ENVIRONMENT])  # chosen by the first process
        return folder if _has_begun(folder) else None
    # Older runs of a token mixer lie in the folder of their backbone.
    folders = {parent, parent.with_name(str(config.backbone["name"]))}
    runs = [path.parent for folder in folders for path in folder.glob(f"*/{CONFIG}")]
    runs = [run for run in runs if run.name != LATEST and _mode(run) == "fit"]
    runs.sort(key=lambda run: run.name, reverse=True)
    equal = [run for run in runs if not differences(run, config)]
    if equal and _has_begun(equal[0]):
        return _check_free(equal[0])
    if sweep:
        log_info("No run with these settings to resume; a new one starts")
        return None
    if equal:
        raise ValueError(
            f"{equal[0]} ended before its first checkpoint and cannot be resumed; start a new run "
            "without resume=true"
        )
    runs = [run for run in runs if run.parent == parent]
    if not runs:
        raise ValueError(
            f"{parent} has no run to resume; start one without resume=true, "
            "or pass ckpt=<run folder>"
        )
    check_same_config(runs[0], config)
    return None


def _parent(config: RunConfig) -> Path:
    return Path(config.output_dir) / config.task_name / config_network_name(config.backbone)


def _find_run_folder(path: Path) -> Path:
    """Return the run folder of a path, which is the folder itself or a checkpoint inside."""
    if not path.exists():
        raise ValueError(f"{path} does not exist; pass a checkpoint or run folder")
    folder = (path if path.is_dir() else path.parent.parent).resolve()
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} lacks a {CONFIG}, so it is not a run that can be resumed")
    if path.is_dir() and not _has_begun(folder):
        raise ValueError(f"{folder} lacks a checkpoint, so it cannot be resumed; start a new run")
    return folder


def _check_free(folder: Path) -> Path:
    if is_first_process():
        lock.refuse_if_held(folder)
        check_sources(folder, read_config(folder / CONFIG)["backbone"])
    return folder


def _has_begun(folder: Path) -> bool:
    return any((folder / "checkpoints").glob("*.ckpt"))


def _mode(folder: Path) -> str | None:
    try:
        mode = read_config(folder / CONFIG).get("mode")
    except ValueError:
        return None
    return mode if isinstance(mode, str) else None


def differences(folder: Path, config: RunConfig) -> list[str]:
    """Return the settings that must equal those of the run but differ, with both values.

    These count as equal: a value that the run chose itself and the command leaves open, a default
    that only one of them lists, and a file that the run started from and that has moved.
    """
    from tools.runs.default_values import comparable_config, is_default

    saved = read_config(folder / CONFIG)
    before, now = (comparable_config(flatten(content)) for content in (saved, config.plain()))
    return [
        f"{key}: {before.get(key)} then, {now.get(key)} now"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
        and not _is_free(key)
        and not _is_open(key, saved, now)
        and not (key == f"{STOPPING}.mode" and {before.get(PATIENCE), now.get(PATIENCE)} & {None})
        and not _has_moved(key, before.get(key), now)
        and not (key not in before and is_default(now, key))
        and not (key not in now and is_default(before, key))
    ]


def _is_open(key: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return True for an option that neither the run nor the command sets."""
    if key in (*MEASURED, *TAKEN) and now.get(key) is None:
        return True
    decides = RATE if key == REFERENCE else key
    return now.get(decides) == AUTO and is_automatic(saved, decides)


def _has_moved(key: str, before: Any, now: Mapping[str, Any]) -> bool:
    """Return True for a file that the run started from, if it has moved to the given path."""
    if key == START and now.get("ckpt") is not None:
        return True  # the command passes the run itself
    are_paths = isinstance(before, str) and isinstance(now.get(key), str)
    return key in (START, TEACHER) and are_paths and not Path(before).exists()


def check_same_config(folder: Path, config: RunConfig) -> None:
    """Refuse to resume a run with other settings.

    Raises:
        ValueError: Lists the settings that differ, with both values.
    """
    differ = differences(folder, config)
    if differ:
        raise ValueError(
            f"{folder} was trained with other settings ({'; '.join(differ[:6])}); "
            "pass the same ones to resume it, or start a new run"
        )


def describe_new_length(folder: Path, config: RunConfig) -> str | None:
    """Describe the old and new length of a run, if they differ."""
    before, now = flatten(read_config(folder / CONFIG)), flatten(config.plain())
    differ = [key for key in sorted(LENGTH) if before.get(key) != now.get(key)]
    return "; ".join(f"{key}={now.get(key)}, before {before.get(key)}" for key in differ) or None


def log_rounding(folder: Path, config: RunConfig) -> None:
    """Log options that make a resumed run round differently from its folder's."""
    before, now = flatten(read_config(folder / CONFIG)), flatten(config.plain())
    differ = [key for key in ROUNDS if key in before and before[key] != now.get(key)]
    if differ and is_first_process():
        changes = "; ".join(f"{key}={now.get(key)}, before {before[key]}" for key in differ)
        log_info(f"{changes}: the run continues from the same state, with other roundings")


def restore_start(config: RunConfig, folder: Path) -> None:
    """Set ``backbone.pretrained`` of a resumed run to the value that it started with."""
    start = read_config(folder / CONFIG)["backbone"].get("pretrained")
    config.backbone = {**config.backbone, "pretrained": start}


def update_config(folder: Path, config: RunConfig, *, resumed: bool) -> None:
    """Write the config of a run to its config.yaml; a resumed run keeps its first command."""
    if not is_first_process():
        return
    before = read_config(folder / CONFIG) if resumed else {}
    words = {key: before[key] for key in OF_A_COMMAND if key in before}
    write_whole(folder / CONFIG, yaml.safe_dump({**config.plain(), **words}, sort_keys=False))


def _is_free(key: str) -> bool:
    return key in LENGTH | AT_END or may_differ(key)


def may_differ(key: str) -> bool:
    """Return True if results do not depend on an option, given by its dotted name."""
    return key in FREE_ON_RESUME or key.partition(".")[0] in FREE_GROUPS
