"""Check options of Hydra itself: only launchers with plain options and verbosity are allowed.

Hydra instantiates classes and reads config folders that its own options name. So everything that is
not listed here is rejected.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections.abc import Sequence

from tools.cli.grammar import parse
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
# Lightning passes these to the other processes of a run.
PROCESS_OPTIONS = {"hydra.run.dir", "hydra.job.name", "hydra.output_subdir"}


def check_hydra(arguments: Sequence[str]) -> None:
    """Reject flags and options of Hydra that name a class, function or folder.

    Raises:
        ValueError: A flag or option is not allowed; the message lists the valid ones.
    """
    for argument in map(str.strip, arguments):
        flag, key = argument.partition("=")[0], argument.partition("=")[0].strip("+~ \t")
        if argument.startswith("-") and flag not in (*SWEEP, *INFO_FLAGS):
            flags = ", ".join(name for name in INFO_FLAGS if name.startswith("--"))
            raise ValueError(f"{flag} is not allowed; run.py takes --help, -m and of Hydra {flags}")
        if "@" in key or (is_hydra_option(argument) and not _is_allowed(argument, key)):
            raise ValueError(
                f"{argument} is not allowed, because it could run other code. Of Hydra, run.py "
                f"takes {LAUNCHER}={'|'.join(LAUNCHERS)}, hydra.launcher.<option>=<word> and "
                "hydra.verbose; for the run's place pass output_dir=<folder>"
            )
        if argument.startswith(f"{LAUNCHER}="):
            _check_launcher(argument.partition("=")[2])


def is_hydra_option(argument: str) -> bool:
    """Return True for an option of Hydra itself."""
    return re.match(r"[\s+~]*hydra\b", argument) is not None


def _is_allowed(argument: str, key: str) -> bool:
    """Return True for an option of Hydra that neither code nor folders depend on."""
    if key in PROCESS_OPTIONS and not is_first_process():
        return True
    if key == LAUNCHER:
        return argument.removeprefix(f"{LAUNCHER}=") in LAUNCHERS
    if key != "hydra.verbose" and key.removeprefix("hydra.launcher.") not in LAUNCHER_OPTIONS:
        return False
    parsed = parse(argument)
    value = None if parsed.is_delete() or parsed.is_sweep_override() else parsed.value()
    is_word = isinstance(value, str) and WORD.fullmatch(value) is not None
    return isinstance(value, bool | int | float) or is_word or argument.endswith("=null")


def _check_launcher(name: str) -> None:
    """Check that a launcher is installed."""
    package = LAUNCHERS[name]
    if package is None:
        return
    if importlib.util.find_spec(f"hydra_plugins.{package.replace('-', '_')}") is None:
        raise ValueError(
            f'{LAUNCHER}={name} needs the package {package}: pip install "mixerlab[sweep]"'
        )
    if name == "submitit_slurm" and shutil.which("srun") is None:
        raise ValueError(f"{LAUNCHER}={name} needs SLURM's srun, which is not on this machine")
    # Runs in other processes must find our packages.
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
