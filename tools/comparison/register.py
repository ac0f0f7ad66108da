"""The registered plan: written and hashed before the first run; later changes are deviations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter

from backbones.options.schemas import validate
from tasks.engine.run_folder.atomic_writes import write_whole
from tasks.engine.run_folder.bounded_reading import DamagedFile, read_json, read_text, read_yaml
from tools.comparison.cells import CellPlan
from tools.comparison.plan import (
    AGAIN_SEED,
    TUNING_SEED,
    Entry,
    Plan,
    plan_changes,
    plan_hash,
    plan_text,
)
from tools.runs.source import DIRTY

PLAN, REGISTERED, LOCK, CELLS = "plan.yaml", "registered.json", "lock", "cells.json"


class Registered(BaseModel):
    """registered.json.

    Attributes:
        hash: Of the plan before the first run.
        time: When it was registered.
        text: The plan as it is now.
        deviations: Changes since then, each with its time.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    hash: str
    time: str
    text: str
    deviations: list[str] = []


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder of a comparison, which is made if it is missing.

    Raises:
        ValueError: Another command holds it.
    """
    from filelock import FileLock, Timeout

    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(
            f"another command compares in {folder}; wait for it, or pass name=<another name>"
        ) from None
    try:
        yield
    finally:
        lock.release()


def read_cell(folder: Path, words: Sequence[Sequence[str]], commit: str | None) -> CellPlan | None:
    """Return a cell as an earlier command measured it; None if it did not, or with other code.

    Args:
        folder: Folder of the comparison.
        words: Of the cell's runs.
        commit: Of today's code.
    """
    entry = _read_cells(folder).get(_cell_key(words, commit)) if commit else None
    return None if entry is None else TypeAdapter(CellPlan).validate_python(entry)


def write_cell(
    folder: Path, words: Sequence[Sequence[str]], commit: str | None, cell: CellPlan
) -> None:
    """Keep a measured cell for later commands, which need not measure it again."""
    if commit and not commit.endswith(DIRTY):
        entries = _read_cells(folder) | {_cell_key(words, commit): asdict(cell)}
        write_whole(folder / CELLS, json.dumps(entries) + "\n")


def _read_cells(folder: Path) -> dict[str, Any]:
    try:
        return dict(read_json(folder / CELLS))
    except FileNotFoundError:
        return {}


def _cell_key(words: Sequence[Sequence[str]], commit: str | None) -> str:
    return plan_hash(json.dumps([commit, *map(list, words)]))


def fixed_entries(
    plan: Plan, mixers: Sequence[Entry], cells: Sequence[CellPlan], commit: str | None
) -> dict[str, Any]:
    """Return what follows from a plan on this machine: settings, data and seeds of its runs."""
    seeds = list(range(plan.seeds))
    return {
        "metric": plan.primary,
        "equivalence": plan.region,
        "controls": [entry.label for entry in mixers if entry.control],
        "seeds": {
            "runs": seeds,
            "baseline again": [AGAIN_SEED + seed for seed in seeds],
            "rates": TUNING_SEED,
        },
        "commit": commit,
        "cells": {
            f"{cell.host} on {cell.data}": {
                "rate": cell.rate,
                "settings": cell.words,
                "samples": cell.samples,
                "fingerprints": cell.prints,
                "does not fit": cell.refused,
            }
            for cell in cells
        },
    }


def register(folder: Path, plan: Plan, entries: dict[str, Any], *, begun: bool) -> Registered:
    """Write plan.yaml before the first run; afterwards note what changed.

    Args:
        folder: Folder of the comparison.
        plan: The plan.
        entries: From ``fixed_entries``.
        begun: True if a run has ended.

    Raises:
        ValueError: The data of a cell changed since its runs.
        DamagedFile: registered.json is unreadable.
    """
    text = plan_text(plan, entries)
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    registered = read_registered(folder) if begun else None
    if registered is None:
        registered = Registered(hash=plan_hash(text), time=now, text=text)
    else:
        changes = plan_changes(registered.text, text)
        for change in changes:
            if ".fingerprints." in change.partition(": ")[0] and ": None before" not in change:
                raise ValueError(
                    f"{folder} has runs on other data ({change}); restore the data, or pass "
                    "name=<another name>"
                )
        edited = _edits(folder, registered.text, text)
        lines = [f"{now}  {change}" for change in [*edited, *changes]]
        registered = registered.model_copy(
            update={"text": text, "deviations": [*registered.deviations, *lines]}
        )
    write_registered(folder, registered)
    return registered


def write_registered(folder: Path, registered: Registered) -> None:
    """Write plan.yaml and registered.json."""
    write_whole(folder / PLAN, registered.text)
    write_whole(folder / REGISTERED, json.dumps(registered.model_dump(), indent=1) + "\n")


def _edits(folder: Path, before: str, now: str) -> list[str]:
    """Describe an edit of plan.yaml that the command does not follow."""
    try:
        content = read_text(folder / PLAN)
    except FileNotFoundError:
        return [f"{PLAN} was removed, and is written anew"]
    if content in (before, now):
        return []
    try:
        if not isinstance(read_yaml(folder / PLAN), dict):
            raise ValueError
    except ValueError:
        return [f"{PLAN} was damaged, and is written anew"]
    if plan_changes(content, now) == []:
        return []
    edits = [change for change in plan_changes(before, content)]
    followed = plan_changes(before, now)
    rest = [edit for edit in edits if edit not in followed]
    return [f"{PLAN} was edited ({edit}), and is written anew" for edit in rest]


def read_registered(folder: Path) -> Registered | None:
    """Return the registered plan of a folder, or None before its first run.

    Raises:
        DamagedFile: The file is unreadable.
    """
    path = folder / REGISTERED
    try:
        return validate(Registered, read_json(path))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise DamagedFile(f"{path} is damaged: {error}") from None
