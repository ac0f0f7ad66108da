"""The registered plan: written and hashed before the first run; later changes are deviations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter

from backbones.options.schemas import validate
from tasks.engine.run_folder.atomic_writes import write_whole
from tasks.engine.run_folder.bounded_reading import DamagedFile, read_json, read_text, read_yaml
from tools.comparison.cells import CellPlan
from tools.comparison.journal import Journal
from tools.comparison.plan import (
    AGAIN_SEED,
    FIXED,
    REGISTERED,
    TUNING_SEED,
    Entry,
    Plan,
    data_entries,
    host_entries,
    plan_changes,
    plan_hash,
    plan_text,
)
from tools.runs.source import DIRTY

PLAN, LOCK, CELLS = "plan.yaml", "lock", "cells.json"


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

    @property
    def plan(self) -> Plan:
        """Return the plan as it is now."""
        content = yaml.safe_load(self.text)
        return validate(Plan, {key: value for key, value in content.items() if key != FIXED})


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
    try:
        return None if entry is None else TypeAdapter(CellPlan).validate_python(entry)
    except ValueError:
        return None


def write_cell(
    folder: Path, words: Sequence[Sequence[str]], commit: str | None, cell: CellPlan
) -> None:
    """Keep a measured cell for later commands, which need not measure it again."""
    if commit and not commit.endswith(DIRTY):
        entries = _read_cells(folder) | {_cell_key(words, commit): asdict(cell)}
        write_whole(folder / CELLS, json.dumps(entries) + "\n")


def _read_cells(folder: Path) -> dict[str, Any]:
    """Return the cells by key; none if the file is damaged, as they can be measured again."""
    try:
        return TypeAdapter(dict[str, Any]).validate_python(read_json(folder / CELLS))
    except (FileNotFoundError, ValueError):
        return {}


def _cell_key(words: Sequence[Sequence[str]], commit: str | None) -> str:
    return plan_hash(json.dumps([commit, *map(list, words)]))


def fixed_entries(
    plan: Plan, mixers: Sequence[Entry], cells: Sequence[CellPlan], commit: str | None
) -> dict[str, Any]:
    """Return what follows from a plan on this machine: settings, data and seeds of its runs."""
    seeds = list(plan.run_seeds)
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
                **_lengths(plan, cell),
            }
            for cell in cells
        },
    }


def _lengths(plan: Plan, cell: CellPlan) -> dict[str, Any]:
    """Return the steps of each mixer, where they follow from the measured pace."""
    steps = {label: network.steps for label, network in cell.networks.items()}
    return {"steps": steps} if plan.budget == "seconds" else {}


def keep_lengths(plan: Plan, cells: Sequence[CellPlan], registered: Registered | None) -> None:
    """Give networks the steps of the registered plan, which a later measurement does not change."""
    if registered is None or plan.budget != "seconds":
        return
    cell_facts = yaml.safe_load(registered.text)[FIXED]["cells"]
    for cell in cells:
        steps = cell_facts.get(f"{cell.host} on {cell.data}", {}).get("steps", {})
        for label, network in cell.networks.items():
            cell.networks[label] = replace(network, steps=steps.get(label, network.steps))


def keep_labels(plan: Plan, registered: Registered, journal: Journal) -> Registered:
    """Give the runs and the registered plan the labels that their hosts and data have by now.

    A label follows from what tells the entries of a plan apart, so that a new entry may change it.

    Raises:
        ValueError: The runs are those of another metric.
    """
    facts, before = yaml.safe_load(registered.text)[FIXED], registered.plan
    if before.primary != plan.primary:
        raise ValueError(
            f"{plan.folder} has runs by {before.primary}; pass name=<another name> for "
            f"metric={plan.primary}, which uses them again"
        )
    labels: dict[str, dict[str, str]] = {}
    for axis, entries in (("host", host_entries), ("data", data_entries)):
        now = {entry.words: entry.label for entry in entries(plan)}
        # Of an entry that was left out, whose label another one has now, the words are the label.
        labels[axis] = {" ".join(words): label for words, label in now.items()}
        for entry in entries(before):
            old_label = " ".join(entry.words) if entry.label in now.values() else entry.label
            labels[axis][entry.label] = now.get(entry.words, old_label)
    journal.relabel(labels)
    places = {
        f"{host} on {data}": f"{new_host} on {new_data}"
        for host, new_host in labels["host"].items()
        for data, new_data in labels["data"].items()
    }
    cells = {places.get(key, key): cell for key, cell in facts["cells"].items()}
    if [*cells] == [*facts["cells"]]:
        return registered
    facts["cells"] = cells
    return registered.model_copy(update={"text": plan_text(before, facts)})


def register(
    folder: Path,
    plan: Plan,
    entries: dict[str, Any],
    registered: Registered | None,
    *,
    begun: bool,
) -> Registered:
    """Write plan.yaml before the first run; afterwards note what changed.

    Args:
        folder: Folder of the comparison.
        plan: The plan.
        entries: From ``fixed_entries``.
        registered: As the last command left it; None before the first run.
        begun: True if a run has begun.

    Raises:
        ValueError: The data of a cell changed since its runs.
    """
    text = plan_text(plan, entries)
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    if registered is None:
        lines = [f"{now}  {REGISTERED} was removed; earlier deviations are unknown"] * begun
        registered = Registered(hash=plan_hash(text), time=now, text=text, deviations=lines)
    else:
        changes = plan_changes(registered.text, text)
        _check_data(folder, yaml.safe_load(registered.text)[FIXED]["cells"], entries["cells"])
        last = read_registered(folder)  # with the labels of before
        edited = _edits(folder, (last or registered).text, text)
        lines = [f"{now}  {change}" for change in [*edited, *changes]]
        registered = registered.model_copy(
            update={"text": text, "deviations": [*registered.deviations, *lines]}
        )
    write_registered(folder, registered)
    return registered


def _check_data(
    folder: Path, before: Mapping[str, dict[str, Any]], now: Mapping[str, dict[str, Any]]
) -> None:
    """Raise ValueError if a cell has other data than its runs."""
    for place in before.keys() & now.keys():
        for name, print_before in before[place]["fingerprints"].items():
            print_now = now[place]["fingerprints"].get(name)
            if print_before not in (None, print_now):
                raise ValueError(
                    f"{folder} has runs on other data ({place}, {name}: {print_before} before, "
                    f"{print_now} now); restore the data, or pass name=<another name>"
                )


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
        registered = validate(Registered, read_json(path))
        yaml.safe_load(registered.text)[FIXED]["cells"].items()
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise DamagedFile(f"{path} is damaged: {error}") from None
    return registered
