"""Detect this process's rank and launcher, and check the trainer against the started processes."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

from tasks.engine.devices import count_devices, has_gpu

PROCESSES_PER_CORE, MANY_PROCESSES = 8, 32  # on a CPU; more processes only fill the memory
BFLOAT16 = (8, 0)  # compute capability of the first GPUs with it (A100)
FIRST_PROCESS = "MIXERLAB_FIRST_PROCESS"  # set for the processes that a run starts
PR_SET_PDEATHSIG = 1  # linux/prctl.h
INTERACTIVE = ("bash", "interactive")  # SLURM's job names of shells; Lightning has the same list


def is_child_process() -> bool:
    """Return True if Lightning started this process for the first one on this machine."""
    return int(os.environ.get("LOCAL_RANK", 0)) > 0 and FIRST_PROCESS in os.environ


def end_with_parent(signum: int | None) -> None:
    """Request a signal for this process when its parent ends; None cancels it (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signum or 0)


def prepare_process() -> None:
    """Prepare signals and OpenMP for a run, before torch is imported."""
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while importing needs no traceback
    if is_child_process():
        end_with_parent(signal.SIGTERM)  # until ``following_first_process``
    # OpenMP's threads spin while they wait. Spinning long, every parallel region waits for a busy
    # neighbour process; sleeping, threads wake late. A step of DeiT-T at 64 pixels on two cores
    # takes 0.11 s with a short spin (long spin 0.10 s, sleep 0.21 s), and 0.30 s beside a second
    # process (long spin 0.50 s, sleep 0.20 s).
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def is_first_process() -> bool:
    """Return True for rank 0 under torchrun or SLURM, and for a command typed by itself."""
    return all(int(os.environ.get(name, 0)) == 0 for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK"))


def find_launcher() -> tuple[str, int] | None:
    """Return the launcher of this process and its number of processes.

    None if the run starts its other processes itself, as in a shell or an interactive job.
    """
    environment = os.environ
    if "TORCHELASTIC_RUN_ID" in environment:
        return "torchrun", int(environment["WORLD_SIZE"])
    if "SLURM_NTASKS" not in environment or environment.get("SLURM_JOB_NAME") in INTERACTIVE:
        return None
    if "SLURM_STEP_NUM_TASKS" in environment:
        return "srun", int(environment["SLURM_STEP_NUM_TASKS"])
    # A job's shell or script is one process, whatever the job's number of tasks. Only processes of
    # srun, and sbatch's script, have a rank.
    if "SLURM_PROCID" not in environment:
        return "salloc", 1
    if environment.get("ENVIRONMENT") == "BATCH":
        return "sbatch", 1
    return "srun", int(environment["SLURM_NTASKS"])


def check_trainer(options: Mapping[str, Any]) -> None:
    """Check that the trainer fits the started processes, before anything is written.

    Raises:
        ValueError: The numbers of processes differ. Only the first process raises it.
    """
    problem = _find_problem(options)
    if problem is None:
        return
    if is_first_process():
        raise ValueError(problem)
    raise SystemExit(2)


def _find_problem(options: Mapping[str, Any]) -> str | None:
    devices, nodes = count_devices(options), int(options["num_nodes"])
    count, launcher = devices * nodes, find_launcher()
    if launcher is None and "RANK" in os.environ and count == 1:
        # Lightning ignores them, but several runs would write into one folder.
        launcher = "a launcher", int(os.environ.get("WORLD_SIZE", 1))
    if launcher is None or launcher[1] == count:
        return _gpu_problem(options) if has_gpu(options) else _cpu_problem(options, count)
    name, processes = launcher
    if count == 1:
        share = max(1, processes // _count_nodes())
        kind = "slurm" if name == "srun" else "ddp"
        kind = kind if has_gpu(options) else "ddp_cpu"
        return (
            f"{name} started {processes} processes, but this trainer uses one, so each process "
            f"would be a separate run; pass trainer={kind} trainer.devices={share} "
            f"trainer.num_nodes={processes // share}, or start python without {name}"
        )
    starter = "torchrun" if name == "torchrun" else "srun"
    return (
        f"{name} started {processes} process{'es' * (processes != 1)}, but trainer.devices="
        f"{options['devices']} and trainer.num_nodes={nodes} make {count}; pass numbers whose "
        f"product is {processes}, or start {count} processes with {starter}"
    )


def _count_nodes() -> int:
    """Return the number of machines that the launcher started processes on."""
    environment = os.environ
    if "LOCAL_WORLD_SIZE" in environment:
        return int(environment["WORLD_SIZE"]) // int(environment["LOCAL_WORLD_SIZE"])
    return int(environment.get("SLURM_STEP_NUM_NODES", environment.get("SLURM_NNODES", 1)))


def _gpu_problem(options: Mapping[str, Any]) -> str | None:
    import torch

    devices, precision = options["devices"], options["precision"]
    numbers = devices if isinstance(devices, list | tuple) else range(count_devices(options))
    existing = range(torch.cuda.device_count())  # Lightning refuses others
    for number in [number for number in numbers if number in existing]:
        capability = torch.cuda.get_device_capability(number)
        if str(precision).startswith("bf16") and capability < BFLOAT16:
            return (
                f"trainer.precision={precision} needs a GPU of compute capability 8.0 or above, "
                f"but {torch.cuda.get_device_name(number)} has {'.'.join(map(str, capability))}; "
                "pass trainer.precision=16-mixed or 32-true"
            )
    return None


def _cpu_problem(options: Mapping[str, Any], count: int) -> str | None:
    if options["accelerator"] in ("gpu", "cuda"):
        return (
            f"trainer.accelerator={options['accelerator']}, but torch sees no GPU here; pass "
            "trainer=cpu, or see python tools/doctor.py for what is installed"
        )
    most = max(MANY_PROCESSES, PROCESSES_PER_CORE * (os.cpu_count() or 1))
    if count > most and find_launcher() is None:  # Lightning would start them
        devices = options["devices"]
        return f"trainer.devices={devices} starts {count} CPU processes; pass at most {most}"
    if options["sync_batchnorm"] and count > 1:
        return (
            "trainer.sync_batchnorm=true needs GPUs, but this run uses the CPU; pass "
            "trainer.sync_batchnorm=false"
        )
    return None
