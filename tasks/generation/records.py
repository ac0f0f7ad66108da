"""Records of what made the files of a folder, so that files of different origin never mix."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tasks.engine.run_folder.atomic_writes import write_whole
from tasks.engine.run_folder.bounded_reading import read_json

RECORD = "made_by.json"


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return 16 digits that tell sets of tensors apart."""
    checksum = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        checksum.update(name.encode())
        flat = value.detach().cpu().contiguous().reshape(-1)
        checksum.update(flat.view(torch.uint8).numpy().tobytes())
    return checksum.hexdigest()[:16]


def differences(folder: Path, made_by: Mapping[str, Any]) -> str:
    """Return how the record of a folder differs, in words; empty if it agrees or is missing.

    Raises:
        DamagedFile: The record cannot be read.
    """
    record = _read(folder)
    if record is None:
        return ""
    return ", ".join(
        f"{name} {record.get(name)} there and {value} here"
        for name, value in made_by.items()
        if record.get(name) != value
    )


def recorded_scale(folder: Path) -> tuple[float, float] | None:
    """Return factor and shift of a folder's latents; None for earlier and other folders."""
    try:
        record = _read(folder) or {}
        return float(record["scale"]), float(record["shift"])
    except (ValueError, KeyError, TypeError):
        return None


def _read(folder: Path) -> dict[str, Any] | None:
    """Return the record of a folder, empty if it is of another form; None if it is missing."""
    try:
        content = read_json(folder / RECORD)
    except FileNotFoundError:
        return None
    return content if isinstance(content, dict) else {}


def write_record(folder: Path, made_by: Mapping[str, Any]) -> None:
    """Write what makes the files of a folder; a missing folder is made."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / RECORD, json.dumps(made_by, indent=1) + "\n")
