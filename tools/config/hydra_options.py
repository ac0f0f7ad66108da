"""What a command may set of Hydra's own: a launcher with plain options, and how much is logged.

Hydra instantiates the classes that its own options name, and reads configs from the folders that
they name. Only what is listed here passes, whatever flag stands beside it.
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
# Flags that Hydra answers itself, without running anything.
ANSWERED = (
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
PLAIN = {
    "n_jobs", "backend", "prefer", "require", "verbose", "timeout", "pre_dispatch", "batch_size",
    "max_nbytes", "timeout_min", "cpus_per_task", "gpus_per_node", "tasks_per_node", "mem_gb",
    "nodes", "name", "stderr_to_stdout", "partition", "qos", "comment", "constraint", "exclude",
    "gres", "cpus_per_gpu", "gpus_per_task", "mem_per_gpu", "mem_per_cpu", "account",
    "signal_delay_s", "max_num_timeout", "array_parallelism",
}  # fmt: skip
WORD = re.compile(r"[\w.,:+&|-]*")
OF_FOLDERS = ("hydra.run", "hydra.sweep.", "hydra.output_subdir", "hydra.job.chdir")
# Lightning starts the other processes of a run with these, which it chose itself.
OF_PROCESSES = {"hydra.run.dir", "hydra.job.name", "hydra.output_subdir"}


def check_hydra(arguments: Sequence[str]) -> None:
    """Refuse flags and options of Hydra's that name a class, a function or a folder.

    Raises:
        ValueError: Names the flag or option, and what may be typed.
    """
    known = (*SWEEP, *ANSWERED)
    for argument in arguments:
        flag = argument.partition("=")[0]
        if argument.startswith("-") and flag not in known:
            raise ValueError(
                f"{flag} is refused; run.py takes --help, -m and of Hydra's flags "
                f"{', '.join(name for name in ANSWERED if name.startswith('--'))}"
            )
    for argument in arguments:
        if not argument.startswith("-"):
            _check(argument.strip())


def is_of_hydra(argument: str) -> bool:
    """Return True for an option of Hydra's own."""
    return re.match(r"[\s+~]*hydra\b", argument) is not None


def _check(argument: str) -> None:
    key = argument.partition("=")[0].strip("+~ \t")
    if "@" in key:
        raise ValueError(f"{argument} is refused: an option has one place; type it without @")
    if not is_of_hydra(argument):
        return
    if key in OF_PROCESSES and not is_first_process():
        return
    if key.startswith(OF_FOLDERS):
        raise ValueError(f"{argument} is refused: pass output_dir=<folder> for where runs go")
    parsed = OverridesParser.create().parse_override(argument)
    option = key.removeprefix("hydra.launcher.")
    if argument.startswith(f"{LAUNCHER}="):
        _check_launcher(argument.partition("=")[2])
    elif key == "hydra.verbose" or (option != key and option in PLAIN):
        _check_plain(argument, parsed)
    else:
        raise ValueError(
            f"{argument} is refused: a command may not have other code called. Of Hydra's options "
            f"it takes {LAUNCHER}=<name>, hydra.launcher.<option>=<number or word>, hydra.verbose"
        )


def _check_plain(argument: str, parsed: Override) -> None:
    value = None if parsed.is_delete() or parsed.is_sweep_override() else parsed.value()
    text = value.text if isinstance(value, QuotedString) else value
    plain = isinstance(text, bool | int | float) or argument.endswith("=null")
    if not plain and not (isinstance(text, str) and WORD.fullmatch(text)):
        raise ValueError(f"{argument} is refused: give a number, true, false, null or a word")


def _check_launcher(name: str) -> None:
    """Refuse a launcher that does not exist, or one that is not installed."""
    if name not in LAUNCHERS:
        known = ", ".join(LAUNCHERS)
        raise ValueError(f"there is no {LAUNCHER} called {name!r}; known: {known}")
    package = LAUNCHERS[name]
    if package is None:
        return
    if importlib.util.find_spec(f"hydra_plugins.{package.replace('-', '_')}") is None:
        raise ValueError(
            f"{LAUNCHER}={name} needs the package {package}: "
            "pip install -c constraints.txt -e '.[sweep]'"
        )
    # Where the runs are other programs, they have to find ours.
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
