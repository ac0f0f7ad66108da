"""A row of the leaderboard once more: its runs on this machine, beside the published ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from backbones.options import unknown
from tools.cli.grammar import key_of
from tools.cli.printable import counted
from tools.cli.tables import Record, write
from tools.cli.typed_network import split_outside_brackets
from tools.comparison.cells import CellPlan, compose_run, measure_cell, run_words
from tools.comparison.journal import Journal, Run
from tools.comparison.leaderboard import (
    FOLDER,
    Leaderboard,
    Row,
    code_text,
    file_name,
    has_same_data,
    mixer_entry,
    read_leaderboard,
)
from tools.comparison.plan import Entry, data_entries, host_entries
from tools.comparison.register import PLAN, locked
from tools.comparison.runner import Comparison
from tools.comparison.statistics import Cell, estimate_errors, repeat_interval
from tools.comparison.work import format_seconds, run_plan, say

COLUMNS = {
    "host": ("host", "{}"), "data": ("data", "{}"), "published": ("published", "{:.2f}"),
    "interval": ("95 %", "{}"), "here": ("here", "{:.2f}"), "runs": ("runs", "{}"),
    "falls": ("falls into it", "{}"),
}  # fmt: skip
ROUNDING = 0.005  # half a unit of the last printed digit


@dataclass
class Verification(Comparison):
    """Runs of the leaderboard that are repeated.

    Attributes:
        runs: Their plan.
    """

    runs: Sequence[Run] = field(default_factory=list)

    def planned(self) -> Iterator[Run]:
        """Yield the runs."""
        return iter(self.runs)


def verify(
    mixer: str, host: str = "", data: str = "", folder: Path = FOLDER, output_dir: str = "outputs"
) -> None:
    """Repeat the published runs of a mixer, and print whether they fall into the interval.

    Args:
        mixer: Its label.
        host: Labels of hosts, separated by commas; empty for all.
        data: Labels of data sets likewise, each with words that replace those of the plan, such as
            "cifar10 data.root=/data/cifar10".
        folder: Folder of the leaderboard.
        output_dir: Where the folder of the runs is made.

    Raises:
        ValueError: Such rows are missing, or the data or the mixer's code differ.
        SystemExit: A cell is outside of its interval; the status is 1.
    """
    leaderboard = read_leaderboard(folder)
    if leaderboard is None:
        raise ValueError(f"{folder} lacks a leaderboard; pass leaderboard=<its folder>")
    plan = leaderboard.plan.model_copy(
        update={"name": f"verify_{Path(file_name(mixer)).stem}", "output_dir": output_dir}
    )
    if mixer not in leaderboard.mixers:
        raise ValueError(unknown("mixer on the leaderboard", mixer, leaderboard.mixers))
    entry, baseline = (mixer_entry(plan, label) for label in (mixer, plan.baseline))
    entry = replace(entry, control="", later=0)
    hosts, sets = (
        _choose(host_entries(plan), host, "host"),
        _choose(data_entries(plan), data, "data"),
    )
    cells = {(h.label, d.label): (h, d) for h in hosts for d in sets}
    rows = [row for row in leaderboard.finals() if row.mixer == mixer and row.cell in cells]
    if not rows:
        raise ValueError(f"{mixer} lacks rows for host={host or 'any'} data={data or 'any'}")
    cells = {cell: cells[cell] for cell in cells if any(row.cell == cell for row in rows)}
    for h, d in cells.values():
        compose_run(run_words(plan, h, d, entry))
    with locked(plan.folder):
        measured = []
        for cell, (h, d) in cells.items():
            say(f"measuring {mixer} in {h.label} on {d.label}")
            network_cell = measure_cell(plan, h, d, list(dict.fromkeys([baseline, entry])))
            _check_cell(leaderboard, network_cell, [row for row in rows if row.cell == cell])
            measured.append(network_cell)
        runs = [
            Run(
                stage="repeat", mixer=mixer, host=row.host, data=row.data, seed=row.seed,
                factor=row.factor,
            )
            for cell in cells
            for row in sorted(rows, key=lambda row: row.seed)
            if row.cell == cell
        ]  # fmt: skip
        journal = Journal(plan.folder)
        journal.runs.clear()  # its rows may be those of other settings, code or data
        verification = Verification(
            plan, [entry], hosts, sets, measured, plan.folder, journal, say, runs=runs
        )
        for run in verification.made_before():
            journal.add(run)
        seconds = sum(verification.estimate(run) for run in verification.remaining())
        say(f"{counted(len(runs), 'run')}, {format_seconds(seconds)} left")
        run_plan(verification, tables=False)
    _show(leaderboard, verification, rows)


def _choose(entries: Sequence[Entry], text: str, key: str) -> list[Entry]:
    """Return the entries that a text names, with its words in place of the plan's."""
    if not text:
        return list(entries)
    labels, choice = {entry.label: entry for entry in entries}, []
    for item in split_outside_brackets(text, ","):
        parts = split_outside_brackets(item, " ")
        words = [part for part in parts if "=" in part]
        label = " ".join(part for part in parts if part not in words)
        if label not in labels:
            raise ValueError(f"{key}={unknown(key, label, labels)}")
        keys = {key_of(word) for word in words}
        rest = [word for word in labels[label].words if key_of(word) not in keys]
        choice.append(replace(labels[label], words=(*rest, *words)))
    return choice


def _check_cell(leaderboard: Leaderboard, cell: CellPlan, rows: Sequence[Row]) -> None:
    """Take the published settings of a cell, after a check of its data and code."""
    mixer, place = rows[0].mixer, f"{cell.host} on {cell.data}"
    if mixer in cell.refused:
        raise ValueError(f"{mixer} does not fit {place}: {cell.refused[mixer]}")
    facts = leaderboard.cells[cell.key]
    if not has_same_data(facts, {"fingerprints": cell.prints, "samples": cell.samples}):
        raise ValueError(
            f"the data of {place} differ from those of {leaderboard.folder / PLAN}; choose data= "
            "with the same files, such as data='<label> data.root=/data/<folder>'"
        )
    if not rows[0].is_by_code(code_text(cell.networks[mixer].answers)):
        say(f"the code of {mixer} computes another function than that of its rows in {place}")
    cell.rate, cell.words = facts["rate"], list(facts["settings"])
    network = cell.networks[mixer]
    steps = facts.get("steps", {}).get(mixer, network.steps)  # stated where the pace decides
    cell.networks[mixer] = replace(network, steps=steps)


def _show(leaderboard: Leaderboard, verification: Verification, rows: Sequence[Row]) -> None:
    """Print the table and the verdict."""
    errors, mixer = estimate_errors(leaderboard.values()), rows[0].mixer
    results: dict[Cell, list[float]] = {}
    for run in verification.journal.finished("repeat"):
        results.setdefault(run.cell, []).append(run.value)
    cells = [cell.key for cell in verification.cells if cell.key in results]
    if not cells:
        raise ValueError(
            f"no run ended with a result; their output is in {verification.folder}/logs"
        )
    records: list[Record] = []
    for cell in cells:
        published = [row.value for row in rows if row.cell == cell]
        mean = float(np.mean(results[cell]))
        record: Record = {"host": cell[0], "data": cell[1], "published": float(np.mean(published)),
                          "interval": None, "here": mean, "runs": len(results[cell]),
                          "falls": None}  # fmt: skip
        variance, degrees = errors.of(mixer, cell)
        if degrees:  # else the deviation of a seed is unknown
            ends = repeat_interval(published, len(results[cell]), variance, degrees, len(cells))
            low, high = np.clip(ends, *leaderboard.plan.bounds).tolist()
            text, rounding = f"{low:.2f} to {high:.2f}", 0.0 if variance else ROUNDING
            is_inside = low - rounding <= mean <= high + rounding
            record |= {"interval": text, "falls": "yes" if is_inside else "no"}
        records.append(record)
    write(records, "table", COLUMNS)
    outside = sum(record["falls"] == "no" for record in records)
    judged = sum(record["falls"] is not None for record in records)
    say(f"{judged - outside} of {counted(judged, 'cell')} within the interval of all together")
    if len(cells) < len(verification.cells):
        missing = len(verification.cells) - len(cells)
        say(f"{counted(missing, 'cell')} without a result; repeat the command to try again")
    if outside:
        raise SystemExit(1)
