"""The leaderboard: runs of comparisons that are published, which several machines add to.

Its folder holds plan.yaml, the plan that all rows follow, and a CSV per mixer with a row per run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict

from backbones.checkpoints.equations import first_change
from backbones.options.schemas import validate
from tasks.engine.run_folder.atomic_writes import write_whole
from tasks.engine.run_folder.bounded_reading import DamagedFile, read_yaml
from tasks.engine.run_folder.schemas import read_summary
from tools.cli.grammar import key_of
from tools.cli.paths import ROOT
from tools.cli.printable import counted
from tools.comparison.cells import TERMS, term_text
from tools.comparison.csv_rows import csv_text, read_models
from tools.comparison.journal import Journal, Run
from tools.comparison.plan import (
    FIXED,
    PUBLISHED,
    REGISTERED,
    Entry,
    Plan,
    data_entries,
    host_entries,
    mixer_entries,
    mixer_kind,
    plan_changes,
)
from tools.comparison.register import PLAN, Registered, read_registered
from tools.comparison.runner import Comparison
from tools.comparison.statistics import Cell
from tools.comparison.table import is_chosen
from tools.runs.folder import FREE_ON_RESUME
from tools.runs.source import DIRTY

FOLDER = ROOT / "docs" / "leaderboard"
OUTPUT = "output"  # of the network, in the fingerprint of its code
Place = tuple[str, str, str]  # mixer, host and data set


class Row(BaseModel):
    """A published run.

    Attributes:
        mixer: Label of the mixer.
        stage: As in runs.csv of a comparison.
        host: Label of the host.
        data: Label of the data set.
        seed: Its seed.
        factor: Of the recipe's learning rate.
        value: The primary metric.
        lr: Learning rate.
        parameters: Of the whole model.
        macs: Multiply-adds of the backbone for one input.
        samples: Samples that the metric is of.
        terms: What a mixer may force to differ: class tokens, pooling, norms.
        plan: Hash of the plan before its first run.
        code: Fingerprint of the network's code: what it answers to a small input.
        commit: Of the checkout.
        device: Name of the processor or GPU.
        precision: Of the training.
        seconds: Of the whole command.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    mixer: str
    stage: Literal["tune", "untuned", "final"]
    host: str
    data: str
    seed: int
    factor: float
    value: float
    lr: float
    parameters: int
    macs: int
    samples: int
    terms: str
    plan: str
    code: str
    commit: str
    device: str
    precision: str
    seconds: float

    @property
    def key(self) -> tuple[str, str, str, str, int, float]:
        """Return what identifies the row."""
        return self.mixer, self.stage, self.host, self.data, self.seed, self.factor

    @property
    def place(self) -> Place:
        """Return mixer, host and data set."""
        return self.mixer, self.host, self.data

    @property
    def cell(self) -> Cell:
        """Return host and data set."""
        return self.host, self.data

    def is_by_code(self, code: str) -> bool:
        """Return True if a fingerprint of the code equals that of the row, to rounding."""
        texts = self.code, code
        answers = ({OUTPUT: [float(part) for part in text.split()]} for text in texts)
        return self.code == code or ("" not in texts and first_change(*answers) is None)


class Publication(BaseModel):
    """A plan whose runs are on the leaderboard.

    Attributes:
        hash: Of the plan before its first run.
        time: When it was registered.
        deviations: Changes since then.
        differences: From the plan of the leaderboard.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    hash: str
    time: str
    deviations: list[str] = []
    differences: list[str] = []


@dataclass
class Leaderboard:
    """A leaderboard.

    Attributes:
        folder: Its folder.
        plan: The plan that all rows follow.
        facts: What followed from the plan on the machine of its first runs.
        publications: Plans whose runs are here, the leaderboard's own first.
        rows: By key.
    """

    folder: Path
    plan: Plan
    facts: dict[str, Any]
    publications: list[Publication]
    rows: dict[tuple[Any, ...], Row] = field(default_factory=dict)

    @property
    def cells(self) -> dict[Cell, dict[str, Any]]:
        """Return what followed from the plan in each cell."""
        return fixed_cells(self.plan, self.facts)

    @property
    def mixers(self) -> list[str]:
        """Return the mixers with rows, in the order of the plan; others follow."""
        present = {row.mixer for row in self.rows.values()}
        order = [label for label in self.plan.mixer if label in present]
        return [*order, *sorted(present - {*order})]

    def finals(self) -> Iterator[Row]:
        """Yield the rows that are compared, in cells of the plan."""
        cells = self.cells
        return (row for row in self.rows.values() if row.stage == "final" and row.cell in cells)

    def values(self) -> dict[str, dict[Cell, list[float]]]:
        """Return the metric of each run: by mixer, then by cell."""
        values: dict[str, dict[Cell, list[float]]] = {mixer: {} for mixer in self.mixers}
        for row in self.finals():
            values[row.mixer].setdefault(row.cell, []).append(row.value)
        return values


def fixed_cells(plan: Plan, facts: Mapping[str, Any]) -> dict[Cell, dict[str, Any]]:
    """Return what followed from a plan in each cell."""
    cells = facts["cells"]
    return {
        (host.label, data.label): cells[f"{host.label} on {data.label}"]
        for host in host_entries(plan)
        for data in data_entries(plan)
        if f"{host.label} on {data.label}" in cells
    }


def read_leaderboard(folder: Path = FOLDER) -> Leaderboard | None:
    """Return the leaderboard of a folder, or None before its first publication.

    Raises:
        DamagedFile: A file is unreadable.
    """
    path = folder / PLAN
    try:
        content = read_yaml(path)
        publications = [validate(Publication, entry) for entry in content.pop(PUBLISHED)]
        facts: dict[str, Any] = content.pop(FIXED)
        leaderboard = Leaderboard(folder, validate(Plan, content), facts, publications)
        leaderboard.cells  # noqa: B018 - reads them
    except FileNotFoundError:
        return None
    except DamagedFile:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedFile(f"{path} is damaged: {error}") from None
    for file in sorted(folder.glob("*.csv")):
        leaderboard.rows |= {row.key: row for row in read_models(file, Row)}
    return leaderboard


def publish(
    source: Path, folder: Path, say: Callable[[str], None], *, new_cells: bool = False
) -> None:
    """Add the runs of a comparison to a leaderboard.

    Rows that are there stay, unless their mixer has other code by now in that cell.

    Args:
        source: Folder of the comparison.
        folder: Folder of the leaderboard.
        say: Prints a line.
        new_cells: Add the comparison's hosts and data sets to the leaderboard's.

    Raises:
        ValueError: The comparison lacks runs, or follows another plan.
    """
    registered, journal = read_registered(source), Journal(source)
    if registered is None or not journal.finished():
        raise ValueError(
            f"{source} lacks finished runs of a comparison; pass publish=outputs/comparisons/<name>"
        )
    try:
        content = yaml.safe_load(registered.text)
        facts, plan = content.pop(FIXED), validate(Plan, content)
        fixed_cells(plan, facts)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedFile(
            f"{source / REGISTERED} is damaged; an entry of its plan is missing or wrong: {error}"
        ) from None
    leaderboard = _opened(folder, plan, facts, registered)
    if new_cells:
        _add_cells(leaderboard, plan, facts)
    labels = _labels(leaderboard, plan, facts)
    rows, lost_runs = _rows(_comparison(plan, source, journal), labels, registered.hash)
    if not rows:
        raise ValueError(f"the run folders of {source} were moved or deleted: nothing to publish")
    _check_precision(leaderboard, rows)
    outdated = _outdated(leaderboard, rows)
    for key in outdated:
        del leaderboard.rows[key]
    additions = [row for row in rows if row.key not in leaderboard.rows]
    leaderboard.rows |= {row.key: row for row in additions}
    _write(leaderboard)
    say(f"{counted(len(additions), 'row')} added, {len(rows) - len(additions)} there already")
    if outdated:
        say(f"{counted(len(outdated), 'row')} of other code removed")
    if lost_runs:
        say(f"{counted(lost_runs, 'run')} left out, as their folders were moved or deleted")
    uncommitted = sum(row.commit.endswith(DIRTY) for row in additions)
    if uncommitted:
        say(f"{counted(uncommitted, 'row')} made with uncommitted changes")
    say(f"Leaderboard: {folder}")


def _opened(folder: Path, plan: Plan, facts: dict[str, Any], registered: Registered) -> Leaderboard:
    """Return a leaderboard with the publication of a comparison; a new one follows its plan."""
    leaderboard = read_leaderboard(folder)
    entry = Publication(
        hash=registered.hash, time=registered.time, deviations=registered.deviations
    )
    if leaderboard is None:
        return Leaderboard(folder, plan, facts, [entry])
    first, *later = leaderboard.publications
    if first.hash == entry.hash:  # the comparison that it began with, which may have grown
        if not later:  # else it has the cells of further comparisons by now
            leaderboard.plan, leaderboard.facts = plan, facts
        leaderboard.publications = [entry, *later]
        return leaderboard
    texts = (  # without the cells, which are compared one by one
        yaml.safe_dump({k: v for k, v in content.entries().items() if k not in ("host", "data")})
        for content in (leaderboard.plan, plan)
    )
    entry = entry.model_copy(update={"differences": plan_changes(*texts)})
    later = [publication for publication in later if publication.hash != entry.hash]
    leaderboard.publications = [first, *later, entry]
    return leaderboard


def _add_cells(leaderboard: Leaderboard, plan: Plan, facts: Mapping[str, Any]) -> None:
    """Add the cells of a plan to a leaderboard; labels may change, as more names are told apart.

    Raises:
        ValueError: Nothing tells a new data set from one of the leaderboard.
    """
    board, cells = leaderboard.plan, fixed_cells(plan, facts)
    hosts = [_settings(host.words) for host in host_entries(board)]
    more = {"host": [*board.host], "data": [*board.data]}
    for item, host in zip(plan.host, host_entries(plan), strict=True):
        more["host"] += [item] if _settings(host.words) not in hosts else []
    for item, data in zip(plan.data, data_entries(plan), strict=True):
        content = next(content for cell, content in cells.items() if cell[1] == data.label)
        is_known = any(
            _settings(entry.words) == _settings(data.words)
            and has_same_data(board_content, content)
            for entry in data_entries(board)
            for cell, board_content in leaderboard.cells.items()
            if cell[1] == entry.label
        )
        more["data"] += [] if is_known else [item]
    grown = board.model_copy(update=more)
    if len({entry.label for entry in data_entries(grown)}) < len(grown.data):
        raise _mismatch(leaderboard, "a set of the same name has other data")
    labels = {
        (host.label, data.label): (new_host.label, new_data.label)
        for host, new_host in zip(host_entries(board), host_entries(grown), strict=False)
        for data, new_data in zip(data_entries(board), data_entries(grown), strict=False)
    }
    sets = {cell[1]: grown_cell[1] for cell, grown_cell in labels.items()}
    tuned_on = sets.get(board.tuned_on or "", board.tuned_on)
    grown = grown.model_copy(update={"tuned_on": tuned_on})
    contents = {labels[cell]: content for cell, content in leaderboard.cells.items()}
    places, words = _words(grown), _words(plan)
    for cell, content in cells.items():
        known_data = {place[1]: board_content for place, board_content in contents.items()}
        place = next(
            place
            for place, settings in places.items()
            if settings == words[cell] and has_same_data(known_data.get(place[1], content), content)
        )
        contents.setdefault(place, content)
    texts = {f"{host} on {data}": content for (host, data), content in contents.items()}
    leaderboard.plan, leaderboard.facts = grown, {**leaderboard.facts, "cells": texts}
    rows = [
        row.model_copy(update=dict(zip(("host", "data"), labels[row.cell], strict=True)))
        for row in leaderboard.rows.values()
    ]
    leaderboard.rows = {row.key: row for row in rows}


def _labels(leaderboard: Leaderboard, plan: Plan, facts: Mapping[str, Any]) -> dict[Cell, Cell]:
    """Return the leaderboard's cell for each cell of a plan.

    Raises:
        ValueError: The plan has other settings or cells.
    """
    terms, our_terms = _terms(leaderboard.plan), _terms(plan)
    _check_equal(leaderboard, terms, our_terms, [*{**terms, **our_terms}])
    cells, labels = leaderboard.cells, {}
    board_words, words = _words(leaderboard.plan), _words(plan)
    for cell, cell_facts in fixed_cells(plan, facts).items():
        namesakes = [name for name in cells if board_words[name] == words[cell]]
        matches = [name for name in namesakes if has_same_data(cells[name], cell_facts)]
        place = " on ".join(cell)
        if not matches:
            reason = "has other data" if namesakes else (
                "is outside of its cells, which new_cells=true adds"
            )  # fmt: skip
            raise _mismatch(leaderboard, f"{place} {reason}")
        _check_equal(leaderboard, cells[matches[0]], cell_facts, ("rate", "settings"), place)
        labels[cell] = matches[0]
    sets = {cell[1]: board_cell[1] for cell, board_cell in labels.items()}
    tuned_on = {"tuned_on": sets.get(plan.tuned_on or "")}
    _check_equal(leaderboard, {"tuned_on": leaderboard.plan.tuned_on}, tuned_on, ["tuned_on"])
    return labels


def _check_equal(
    leaderboard: Leaderboard,
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    keys: Sequence[str],
    place: str = "",
) -> None:
    """Raise ValueError if entries differ."""
    for key in keys:
        if before.get(key) != now.get(key):
            name = f"{key} of {place}" if place else key
            values = f"{before.get(key)} there, {now.get(key)} here"
            raise _mismatch(leaderboard, f"{name}: {values}")


def _check_precision(leaderboard: Leaderboard, rows: Sequence[Row]) -> None:
    """Raise ValueError if rows were trained in another precision than published ones."""
    precisions = {row.precision for row in leaderboard.rows.values()}
    for row in rows:
        if precisions and row.precision not in precisions:
            values = f"{', '.join(sorted(precisions))} there, {row.precision} here"
            raise _mismatch(leaderboard, f"trainer.precision: {values}")


def _mismatch(leaderboard: Leaderboard, reason: str) -> ValueError:
    return ValueError(
        f"the comparison differs from {leaderboard.folder / PLAN} ({reason}); follow that plan, or "
        "pass leaderboard=<another folder>"
    )


def _terms(plan: Plan) -> dict[str, str]:
    """Return what all cells of a plan have alike."""
    names = ["task", "baseline", "budget", "rates", "primary"]
    names += ["held_out"] if len(plan.rates) > 1 else []
    terms = {name: str(getattr(plan, name)) for name in names}
    return {**terms, "kind": mixer_kind(plan), **_settings(plan.options)}


def _settings(words: Sequence[str]) -> dict[str, str]:
    """Return options by key, without those that leave results alone."""
    pairs = ((key_of(word), word.partition("=")[2]) for word in words)
    return {key: value for key, value in pairs if key not in {*FREE_ON_RESUME, "trainer"}}


def _words(plan: Plan) -> dict[Cell, list[dict[str, str]]]:
    """Return the settings of host and data set by cell."""
    return {
        (host.label, data.label): [_settings(host.words), _settings(data.words)]
        for host in host_entries(plan)
        for data in data_entries(plan)
    }


def has_same_data(published: Mapping[str, Any], ours: Mapping[str, Any]) -> bool:
    """Return True if a cell has the data of another one, by their fingerprints."""
    prints = published["fingerprints"], ours["fingerprints"]
    shared = [name for name in prints[0] if prints[0][name] and prints[1].get(name)]
    return published["samples"] == ours["samples"] and all(
        prints[0][name] == prints[1][name] for name in shared
    )


def _comparison(plan: Plan, folder: Path, journal: Journal) -> Comparison:
    entries = mixer_entries(plan), host_entries(plan), data_entries(plan)
    return Comparison(plan, *entries, [], folder, journal, print)


def _rows(
    comparison: Comparison, labels: Mapping[Cell, Cell], plan_hash: str
) -> tuple[list[Row], int]:
    """Return the rows of a comparison's runs, and the number of those whose folder is gone."""
    rows, lost_runs, mixers = [], 0, {entry.label for entry in comparison.mixers}
    for run in comparison.journal:
        if run.status != "finished" or run.cell not in labels or run.mixer not in mixers:
            continue
        if run.stage == "final" and not is_chosen(comparison, run):
            continue
        try:
            rows.append(_row(run, labels[run.cell], plan_hash))
        except FileNotFoundError:
            lost_runs += 1
    return rows, lost_runs


def _row(run: Run, cell: Cell, plan_hash: str) -> Row:
    summary = read_summary(Path(run.folder) / "summary.json")
    samples = (summary.get("data") or {}).get("samples") or {}
    content = {
        **run.model_dump(include={"mixer", "stage", "seed", "factor", "value", "seconds"}),
        "host": cell[0], "data": cell[1], "plan": plan_hash,
        "lr": summary.get("learning_rate", math.nan), "parameters": int(summary["parameters"]),
        "macs": int(summary["backbone_macs"]), "samples": samples.get("test", samples.get("val")),
        "terms": terms_text(summary),
        "code": code_text(summary.get("fingerprint") or {}),
        "commit": summary.get("git_commit") or "", "device": summary.get("device") or "",
        "precision": summary.get("precision") or "",
    }  # fmt: skip
    try:
        return validate(Row, content)
    except ValueError as error:
        raise DamagedFile(f"{run.folder}/summary.json cannot be published: {error}") from None


def terms_text(summary: Mapping[str, Any]) -> str:
    """Return what a mixer may force to differ, from the summary of a run."""
    facts = {**(summary.get("network") or {}), "pooling": summary.get("pooling")}
    return "; ".join(
        f"{name} {term_text(facts[key])}"
        for key, name in TERMS.items()
        if facts.get(key) is not None
    )


def code_text(answers: Mapping[str, Sequence[float]]) -> str:
    """Return the fingerprint of a network's code as a row has it; empty without one."""
    return " ".join(f"{number:.9g}" for number in answers.get(OUTPUT, ()))


def _outdated(leaderboard: Leaderboard, rows: Sequence[Row]) -> list[tuple[Any, ...]]:
    """Return the keys of published rows whose mixer has other code in new rows of its cell."""
    codes = {row.place: row.code for row in rows}
    return [
        key
        for key, row in leaderboard.rows.items()
        if row.place in codes and not row.is_by_code(codes[row.place])
    ]


def _write(leaderboard: Leaderboard) -> None:
    """Write plan.yaml and the CSVs."""
    folder = leaderboard.folder
    files: dict[str, list[Row]] = {}
    folder.mkdir(parents=True, exist_ok=True)
    publications = [entry.model_dump() for entry in leaderboard.publications]
    content = {**leaderboard.plan.entries(), FIXED: leaderboard.facts, PUBLISHED: publications}
    write_whole(folder / PLAN, yaml.safe_dump(content, sort_keys=False, width=100))
    for row in sorted(leaderboard.rows.values(), key=lambda row: row.key):
        files.setdefault(file_name(row.mixer), []).append(row)
    for name, rows in files.items():
        text = csv_text(list(Row.model_fields), (row.model_dump() for row in rows))
        write_whole(folder / name, text)


def file_name(mixer: str) -> str:
    """Return the name of a mixer's file."""
    return re.sub(r"[^\w.-]+", "_", mixer).strip("_") + ".csv"


def mixer_entry(plan: Plan, label: str) -> Entry:
    """Return a mixer of the leaderboard, which may be no entry of its plan."""
    entries = {entry.label: entry for entry in mixer_entries(plan)}
    if label in entries:
        return entries[label]
    more = plan.model_copy(update={"mixer": [*plan.mixer, label]})
    return next(entry for entry in mixer_entries(more) if entry.label == label)
