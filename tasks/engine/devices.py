"""Devices that the options of a trainer mean on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def has_gpu(options: Mapping[str, Any]) -> bool:
    """Return True if a trainer with these options uses GPUs."""
    import torch

    return options["accelerator"] != "cpu" and torch.cuda.is_available()


def resolve_devices(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a trainer's options; on a CPU a list of devices becomes a number of processes."""
    devices = options["devices"]
    if has_gpu(options) or not isinstance(devices, list | tuple):
        return dict(options)
    return {**options, "devices": len(devices)}


def count_devices(options: Mapping[str, Any]) -> int:
    """Return the number of devices per node that ``trainer.devices`` means."""
    devices = options["devices"]
    if isinstance(devices, list | tuple):
        return len(devices)
    text = str(devices)
    if "," in text:
        return len([part for part in text.split(",") if part.strip()])
    if text in ("-1", "auto"):
        import torch

        return torch.cuda.device_count() if has_gpu(options) else 1
    return int(text) if text.isdigit() else 1
