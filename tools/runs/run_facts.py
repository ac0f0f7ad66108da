"""Facts for a run's summary: its data, machine and measurements."""

from __future__ import annotations

import platform
import resource
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer

from backbones.checkpoints.opening import open_checkpoint
from datamodules import BaseDataModule
from tasks.engine.batches import batches_of_step
from tasks.engine.callbacks.monitors import TimeLimit
from tasks.engine.callbacks.pace import Pace
from tasks.engine.checkpoints.exact_resume import CHECKPOINTS
from tasks.engine.checkpoints.files import BEST, LAST
from tasks.engine.optimisation.optimizer import scaled_lr
from tasks.engine.run_folder.run_config import RunConfig
from tools.runs.fingerprints import fingerprints, training_fingerprints


def collect_facts(
    config: RunConfig, trainer: Trainer, datamodule: BaseDataModule
) -> dict[str, Any]:
    """Return the facts of a finished run for summary.json."""
    facts: dict[str, Any] = {
        "data": {
            "name": config.data["_target_"],
            "root": None if datamodule.root is None else str(datamodule.root),
            "samples": datamodule.sizes(),
            **({"left_out": datamodule.left_out} if datamodule.left_out else {}),
            **datamodule.target_facts(),
            "fingerprints": fingerprints(datamodule),
        },
        "precision": str(trainer.precision),
        "device": device_name(trainer.strategy.root_device),
        "accelerator": trainer.strategy.root_device.type,
        "processes": trainer.world_size,
        "overrides": config.overrides,
        "peak_memory_mib": _peak_memory(trainer.strategy.root_device),
    }
    if config.mode != "fit":
        return facts
    facts["data"]["fingerprints"] |= training_fingerprints(datamodule)
    name = f"{CHECKPOINTS}/{LAST if config.checkpoints == 'last' else BEST}"
    evaluated = Path(trainer.default_root_dir) / name
    processes = trainer.world_size
    batch = datamodule.training_batch(processes) * processes * batches_of_step(trainer, 0)
    optimizer = config.optimizer
    pace = next(call for call in _callbacks(trainer) if isinstance(call, Pace))
    rate, waiting = pace.samples_per_second, pace.waiting_share
    for limit in (call for call in _callbacks(trainer) if isinstance(call, TimeLimit)):
        share = limit.trained_share(trainer)
        if share is not None:
            facts["ended_by_time"] = {"share": share, "max_time": config.trainer["max_time"]}
    return facts | {
        "global_batch": batch,
        "learning_rate": scaled_lr(optimizer["lr"], optimizer.get("reference_batch"), batch),
        "samples_per_second": None if rate is None else round(rate, 2),
        "waiting_for_data": None if waiting is None else round(waiting, 4),
        "num_workers": datamodule.num_workers,
        "resident": config.data.get("resident"),
        "checkpoint": name if evaluated.is_file() else None,
        "checkpoint_step": (
            open_checkpoint(evaluated, values_only=True).step if evaluated.is_file() else None
        ),
    }


def _callbacks(trainer: Trainer) -> list[Any]:
    return list(trainer.callbacks)  # type: ignore[attr-defined]


def _peak_memory(device: torch.device) -> int:
    """Return the peak memory in MiB: of the GPU's tensors, or of this process on a CPU."""
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated(device) / 2**20)
    # ru_maxrss is in kilobytes, but in bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 2**10
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20)


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if device.type == "cpu" and file.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else f"{device.type} {platform.machine()}"
