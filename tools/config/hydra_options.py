"""Check options of Hydra itself: only launchers with plain options and verbosity are allowed.

Hydra instantiates classes and reads config folders that its own options name. So everything that is
not listed here is rejected.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString

from tools.cli.paths import ROOT
from tools.cli.processes import is_first_process

SWEEP = ("--multirun", "-m")
# Flags that print information and start no run.
INFO_FLAGS = (
    "--cfg", "-c", "--resolve", "--package", "-p", "--info", "-i", "--hydra-help", "--version",
    "--shell-completion", "-sc",
)  # fmt: skip
LAUNCHERS = {
    "basic": None,
    "joblib": "hydra-joblib-launcher",
    "submitit_local": "hydra-submitit-launcher",
    "submitit_slurm": "hydra-submitit-launcher",
}
LAUNCHER = "hydra/launcher"
# Options of joblib's and submitit's launchers that take a number or a word.
LAUNCHER_OPTIONS = {
    "n_jobs", "backend", "prefer", "require", "verbose", "timeout", "pre_dispatch", "batch_size",
    "max_nbytes", "timeout_min", "cpus_per_task", "gpus_per_node", "tasks_per_node", "mem_gb",
    "nodes", "name", "stderr_to_stdout", "partition", "qos", "comment", "constraint", "exclude",
    "gres", "cpus_per_gpu", "gpus_per_task", "mem_per_gpu", "mem_per_cpu", "account",
    "signal_delay_s", "max_num_timeout", "array_parallelism",
}  # fmt: skip
WORD = re.compile(r"[\w.,:+&|-]*")
FOLDER_OPTIONS = ("hydra.run", "hydra.sweep.", "hydra.output_subdir", "hydra.job.chdir")
# Lightning passes these to the other processes of a run.
PROCESS_OPTIONS = {"hydra.run.dir", "hydra.job.name", "hydra.output_subdir"}


def check_hydra(arguments: Sequence[str]) -> None:
    """Reject flags and options of Hydra that name a class, function or folder.

    Raises:
        ValueError: A flag or option is not allowed; the message lists the valid ones.
    """
    known = (*SWEEP, *INFO_FLAGS)
    for argument in arguments:
        flag = argument.partition("=")[0]
        if argument.startswith("-") and flag not in known:
            raise ValueError(
                f"{flag} is not allowed; run.py takes --help, -m and of Hydra's flags "
                f"{', '.join(name for name in INFO_FLAGS if name.startswith('--'))}"
            )
    for argument in arguments:
        if not argument.startswith("-"):
            _check_option(argument.strip())


def is_hydra_option(argument: str) -> bool:
    """Return True for an option of Hydra itself."""
    return re.match(r"[\s+~]*hydra\b", argument) is not None


def _check_option(argument: str) -> None:
    key = argument.partition("=")[0].strip("+~ \t")
    if "@" in key:
        raise ValueError(f"{argument} is not allowed: type the option without @")
    if not is_hydra_option(argument):
        return
    if key in PROCESS_OPTIONS and not is_first_process():
        return
    if key.startswith(FOLDER_OPTIONS):
        raise ValueError(f"{argument} is not allowed: pass output_dir=<folder> for the run's place")
    parsed = OverridesParser.create().parse_override(argument)
    option = key.removeprefix("hydra.launcher.")
    if argument.startswith(f"{LAUNCHER}="):
        _check_launcher(argument.partition("=")[2])
    elif key == "hydra.verbose" or (option != key and option in LAUNCHER_OPTIONS):
        _check_value(argument, parsed)
    else:
        raise ValueError(
            f"{argument} is not allowed, because it could run other code. Of Hydra's options "
            f"run.py takes {LAUNCHER}=<name>, hydra.launcher.<option>=<number or word>, "
            "hydra.verbose"
        )


def _check_value(argument: str, parsed: Override) -> None:
    value = None if parsed.is_delete() or parsed.is_sweep_override() else parsed.value()
    text = value.text if isinstance(value, QuotedString) else value
    plain = isinstance(text, bool | int | float) or argument.endswith("=null")
    if not plain and not (isinstance(text, str) and WORD.fullmatch(text)):
        raise ValueError(f"{argument} is not allowed: pass a number, true, false, null or a word")


def _check_launcher(name: str) -> None:
    """Check that a launcher exists and is installed."""
    if name not in LAUNCHERS:
        known = ", ".join(LAUNCHERS)
        raise ValueError(f"{LAUNCHER}={name} is unknown; known: {known}")
    package = LAUNCHERS[name]
    if package is None:
        return
    if importlib.util.find_spec(f"hydra_plugins.{package.replace('-', '_')}") is None:
        raise ValueError(
            f"{LAUNCHER}={name} needs the package {package}: "
            "pip install -c constraints.txt -e '.[sweep]'"
        )
    # Runs in other processes must find our packages.
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
