"""Which of a run's processes this one is, and whether a trainer fits those that were started."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

from backbones.options import check_value

PROCESSES_PER_CORE, MANY_PROCESSES = 8, 32  # on a CPU; more only fill the memory
FIRST = "MIXERLAB_FIRST_PROCESS"  # the process that starts the others of a run, for these
PR_SET_PDEATHSIG = 1  # linux/prctl.h
INTERACTIVE = ("bash", "interactive")  # job names by which SLURM's shells go, also to Lightning


def is_other_of_first() -> bool:
    """Return True if Lightning started this process for the first one of its machine."""
    return int(os.environ.get("LOCAL_RANK", 0)) > 0 and FIRST in os.environ


def end_with_parent(signum: int | None) -> None:
    """Let the system send this process a signal when its parent ends; None ends this (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signum or 0)


def prepare_process() -> None:
    """Prepare signals and OpenMP for a run, before torch is imported."""
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while importing needs no traceback
    if is_other_of_first():
        end_with_parent(signal.SIGTERM)  # until ``following_first_process``
    # OpenMP's threads spin while they wait. Spinning long, every parallel region waits for a busy
    # neighbour process; sleeping, threads wake late. A step of DeiT-T at 64 pixels on two cores
    # takes 0.11 s with a short spin (long spin 0.10 s, sleep 0.21 s), and 0.30 s beside a second
    # process (long spin 0.50 s, sleep 0.20 s).
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def is_first_process() -> bool:
    """Whether this is rank 0 under torchrun or SLURM, or the process that was typed."""
    return all(int(os.environ.get(name, 0)) == 0 for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK"))


def started() -> tuple[str, int] | None:
    """What started this process as one of several that belong together, and how many they are.

    None where a run starts its other processes by itself: in a plain shell, also one within a job.
    """
    environment = os.environ
    if "TORCHELASTIC_RUN_ID" in environment:
        return "torchrun", int(environment["WORLD_SIZE"])
    if "SLURM_NTASKS" not in environment or environment.get("SLURM_JOB_NAME") in INTERACTIVE:
        return None
    if "SLURM_STEP_NUM_TASKS" in environment:
        return "srun", int(environment["SLURM_STEP_NUM_TASKS"])
    # A job's shell or script is one process, whatever number of tasks the job may have; only what
    # srun starts and sbatch's script have a rank.
    if "SLURM_PROCID" not in environment:
        return "salloc", 1
    if environment.get("ENVIRONMENT") == "BATCH":
        return "sbatch", 1
    return "srun", int(environment["SLURM_NTASKS"])


def check_trainer(options: Mapping[str, Any]) -> None:
    """Refuse a trainer that does not fit the processes that were started, before any writes.

    Args:
        options: Of the trainer.

    Raises:
        ValueError: In the first process; the others end without a word.
    """
    problem = _problem(options)
    if problem is None:
        return
    if is_first_process():
        raise ValueError(problem)
    raise SystemExit(2)


def _problem(options: Mapping[str, Any]) -> str | None:
    check_value("trainer.num_nodes", options["num_nodes"], int)
    devices, nodes = device_count(options), int(options["num_nodes"])
    count, launcher = devices * nodes, started()
    if launcher is None and "RANK" in os.environ and count == 1:
        # Lightning does not see them, but several runs would write into one folder.
        launcher = "a launcher", int(os.environ.get("WORLD_SIZE", 1))
    if launcher is None or launcher[1] == count:
        return _without_gpu(options, count)
    name, processes = launcher
    if count == 1:
        share = max(1, processes // _nodes_started())
        kind = "slurm" if name == "srun" else "ddp"
        kind = kind if _has_gpu(options) else "ddp_cpu"
        return (
            f"{name} started {processes} processes, but this trainer uses one, so each would be a "
            f"run of its own; pass trainer={kind} trainer.devices={share} "
            f"trainer.num_nodes={processes // share}, or start python without {name}"
        )
    starter = "torchrun" if name == "torchrun" else "srun"
    return (
        f"{name} started {processes} process{'es' * (processes != 1)}, but trainer.devices="
        f"{options['devices']} and trainer.num_nodes={nodes} make {count}; pass numbers whose "
        f"product is {processes}, or start {count} processes with {starter}"
    )


def _nodes_started() -> int:
    """On how many machines the processes are that were started."""
    environment = os.environ
    if "LOCAL_WORLD_SIZE" in environment:
        return int(environment["WORLD_SIZE"]) // int(environment["LOCAL_WORLD_SIZE"])
    return int(environment.get("SLURM_STEP_NUM_NODES", environment.get("SLURM_NNODES", 1)))


def _without_gpu(options: Mapping[str, Any], count: int) -> str | None:
    if _has_gpu(options):
        return None
    if str(options["strategy"]).startswith("fsdp"):
        return (
            "trainer=fsdp shards over GPUs, and none is used here; pass trainer=ddp_cpu for several"
            " CPU processes or trainer=cpu for one"
        )
    devices = options["devices"]
    if options["accelerator"] == "cpu" and devices != "auto" and not _is_number(devices):
        return (
            f"trainer.devices={devices} is no number of CPU processes, nor a list of as many "
            f"numbers; pass trainer.devices={max(1, count)} or another number from 1 on"
        )
    most = max(MANY_PROCESSES, PROCESSES_PER_CORE * (os.cpu_count() or 1))
    if count > most and started() is None:
        return (
            f"trainer.devices={devices} starts too many CPU processes: {os.cpu_count()} cores "
            f"serve at most {most}; one per core is usual"
        )
    if options["sync_batchnorm"] and count > 1:
        return (
            "trainer.sync_batchnorm=true needs GPUs, and none is used here; pass "
            "trainer.sync_batchnorm=false"
        )
    return None


def _has_gpu(options: Mapping[str, Any]) -> bool:
    import torch

    return options["accelerator"] != "cpu" and torch.cuda.is_available()


def _is_number(devices: Any) -> bool:
    if isinstance(devices, list | tuple):
        numbers = [number for number in devices if isinstance(number, int) and number >= 0]
        return 0 < len(set(numbers)) == len(devices)
    text = str(devices)
    return text.isdigit() and int(text) > 0


def for_this_machine(options: Mapping[str, Any]) -> dict[str, Any]:
    """A trainer's options; where no GPU is used, a list of devices is so many CPU processes."""
    devices = options["devices"]
    if _has_gpu(options) or not isinstance(devices, list | tuple):
        return dict(options)
    return {**options, "devices": len(devices)}


def device_count(options: Mapping[str, Any]) -> int:
    """Return how many devices of a node ``trainer.devices`` means."""
    devices = options["devices"]
    if isinstance(devices, list | tuple):
        return len(devices)
    text = str(devices)
    if "," in text:
        return len([part for part in text.split(",") if part.strip()])
    if text in ("-1", "auto"):
        import torch

        return torch.cuda.device_count() if _has_gpu(options) else 1
    return int(text) if text.isdigit() else 1
