"""The table of a comparison: a record per mixer, with both claims and the costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tools.cli.printable import counted
from tools.cli.tables import Columns, Record
from tools.comparison.answers import read_answers
from tools.comparison.cells import CellPlan
from tools.comparison.journal import Run
from tools.comparison.plan import AGAIN
from tools.comparison.runner import Comparison
from tools.comparison.statistics import (
    Cell,
    Effect,
    Errors,
    beyond,
    estimate_errors,
    interval,
    mean_ranks,
    within,
)

DAGGER, MISSING = "†", "‡"
COSTS = {"parameters": "parameters", "backbone_macs": "MACs", "latency": "latency",
         "throughput": "throughput"}  # fmt: skip
CLAIMS = ("difference", "interval", "verdict", "beyond", "rank", "backbone_macs", "runs")


@dataclass(frozen=True)
class Table:
    """A table as it stands.

    Attributes:
        records: A row per mixer.
        columns: Headings and formats of the main table.
        brief: Those of its columns that a terminal shows.
        cells: A row per mixer and cell.
        cell_columns: Headings and formats of these.
        notes: Lines below the table.
        metrics: Keys of ``records`` with the metric, of which the best are emphasised.
        effects: Effects within the cells, by mixer.
    """

    records: list[Record]
    columns: Columns
    brief: list[str]
    cells: list[Record]
    cell_columns: Columns
    notes: list[str]
    metrics: list[str]
    effects: dict[str, Effect]


def make_table(comparison: Comparison, *, intervals: bool = True) -> Table:
    """Return the table of the runs that have ended.

    Args:
        comparison: Its plan and runs.
        intervals: Resample test samples for the intervals of the cells.
    """
    plan, runs = comparison.plan, chosen_runs(comparison)
    values: dict[str, dict[Cell, list[float]]] = {entry.label: {} for entry in comparison.mixers}
    for run in runs:
        values[run.mixer].setdefault(run.cell, []).append(run.value)
    untuned, errors = _untuned_values(comparison, runs), estimate_errors(values)
    ours = within(values, plan.baseline, plan.region, plan.sign)
    wider = beyond(values, plan.baseline, plan.region, plan.sign)
    ranks = mean_ranks(values, plan.sign)
    cells = [
        _cell_record(comparison, label, cell, runs, untuned, errors, intervals=intervals)
        for label in values
        for cell in comparison.cells
    ]
    records = []
    for entry in comparison.mixers:
        label = entry.label
        inside, outside = ours.get(label), wider.get(label)
        record: Record = {"mixer": label + _marks(comparison, label, values[label])}
        for cell in comparison.cells:
            cell_rows = [
                r for r in cells if (r["mixer"], r["host"], r["data"]) == (label, *cell.key)
            ]
            record[_column(cell)] = cell_rows[0]["metric"]
        record |= {
            "difference": inside.mean if inside and inside.cells else None,
            "interval": _ends(inside),
            "verdict": inside.verdict if inside else "baseline",
            "beyond": outside.verdict if outside else "baseline",
            "untuned": _mean_gap(untuned, label, plan.baseline, plan.sign),
            "rank": ranks[label] if math.isfinite(ranks[label]) else None,
            **_of_single_cell(cells, label, len(comparison.cells)),
            **{name: _ratio(comparison.cells, label, plan.baseline, name) for name in COSTS},
            "runs": sum(run.mixer == label for run in runs),
            "role": entry.control or None,
        }
        records.append(record)
    metrics = [_column(cell) for cell in comparison.cells]
    figures = "{:.2f}" if plan.region >= 0.1 else "{:.4f}"
    signed = figures.replace(":", ":+")
    columns: dict[str, tuple[str, str]] = {"mixer": ("mixer", "{}")}
    for cell in comparison.cells:
        place = f", {_column(cell)}" if len(comparison.cells) > 1 else ""
        columns[_column(cell)] = (f"{plan.primary}{place}", figures)
    columns |= {
        "difference": ("difference", signed), "interval": ("95 %", "{}"),
        "verdict": ("within", "{}"), "beyond": ("beyond", "{}"), "rank": ("rank", "{:.1f}"),
        "untuned": ("untuned", signed),
        "ece": ("ECE", "{:.3f}"), "sensitivity": ("sensitivity", figures),
        "parameters": ("parameters x", "{:.2f}"), "backbone_macs": ("MACs x", "{:.2f}"),
        "latency": ("latency x", "{:.2f}"), "throughput": ("throughput x", "{:.2f}"),
        "memory": ("memory MiB", "{:.0f}"), "runs": ("runs", "{}"), "role": ("control", "{}"),
    }  # fmt: skip
    columns_shown = {
        key: c for key, c in columns.items() if any(r[key] is not None for r in records)
    }
    single = metrics if len(metrics) == 1 else []
    brief = [key for key in ("mixer", *single, *CLAIMS) if key in columns_shown]
    cell_columns: dict[str, tuple[str, str]] = {
        "mixer": ("mixer", "{}"), "host": ("host", "{}"), "data": ("data", "{}"),
        "metric": (plan.primary, figures), "interval": ("95 %", "{}"), "runs": ("runs", "{}"),
        "untuned": ("untuned", figures),
        "factor": ("rate x", "{:g}"), "sensitivity": ("sensitivity", figures),
        "ece": ("ECE", "{:.3f}"), "parameters": ("parameters", "{:,}"),
        "backbone_macs": ("MACs", "{:,}"), "latency": ("latency ms", "{:.2f}"),
        "throughput": ("inputs/s", "{:.0f}"), "memory": ("memory MiB", "{:.0f}"),
        "note": ("note", "{}"),
    }  # fmt: skip
    return Table(
        records=[{key: record[key] for key in columns_shown} for record in records],
        columns=columns_shown, brief=brief, cells=cells, cell_columns=cell_columns,
        notes=_notes(comparison, ours, wider, runs, errors), metrics=metrics, effects=ours,
    )  # fmt: skip


def _of_single_cell(cells: Sequence[Record], label: str, count: int) -> Record:
    """Return figures that are not averaged; with several cells the table of cells has them."""
    (row, *_) = (row for row in cells if row["mixer"] == label)
    return {name: row[name] if count == 1 else None for name in ("ece", "sensitivity", "memory")}


def chosen_runs(comparison: Comparison) -> list[Run]:
    """Return the plan's runs that ended, with the rates that were chosen."""
    planned = {run.key[:5] for run in comparison.planned() if run.stage == "final"}
    runs = [run for run in comparison.journal.finished() if run.key[:5] in planned]
    return [run for run in runs if is_chosen(comparison, run)]


def is_chosen(comparison: Comparison, run: Run) -> bool:
    """Return True for a run with the rate that was chosen."""
    settled = comparison.settled(run.model_copy(update={"factor": 1.0}))
    return settled is not None and settled.factor == run.factor


def failed_runs(comparison: Comparison) -> list[Run]:
    """Return the failed runs of the plan, without those that ended with another rate."""
    planned = {run.key[:5] for run in comparison.planned()}
    ended = {run.key[:5] for run in comparison.journal if run.status == "finished"}
    return [
        run
        for run in comparison.journal
        if run.status == "failed"
        and run.key[:5] in planned
        and (run.stage == "tune" or run.key[:5] not in ended)
    ]


def _column(cell: CellPlan) -> str:
    return f"{cell.host} on {cell.data}"


def _marks(comparison: Comparison, label: str, values: dict[Cell, list[float]]) -> str:
    networks = [cell for cell in comparison.cells if label in cell.networks]
    unequal = any(cell.differing(label, comparison.plan) for cell in networks)
    counts = [len(values.get(cell.key, ())) for cell in comparison.cells]
    return DAGGER * unequal + MISSING * (min(counts) < comparison.plan.seeds)


def _ends(effect: Effect | None) -> str | None:
    if effect is None or not math.isfinite(effect.low):
        return None
    return f"{effect.low:+.3g} to {effect.high:+.3g}"


def _mean(values: Any) -> float | None:
    figures = [value for value in values if value is not None]
    return float(np.mean(figures)) if figures else None


def _ratio(cells: Sequence[CellPlan], label: str, baseline: str, name: str) -> float | None:
    """Return the geometric mean over cells of a cost over the baseline's."""
    ratios = []
    for cell in cells:
        ours, base = cell.networks.get(label), cell.networks[baseline]
        if ours is not None and name in ours.ratios:  # of timings, side by side
            ratios.append(ours.ratios[name])
        elif ours is not None and getattr(ours, name) and getattr(base, name):
            ratios.append(getattr(ours, name) / getattr(base, name))
    return math.exp(float(np.mean(np.log(ratios)))) if ratios else None


def _untuned_values(
    comparison: Comparison, runs: Sequence[Run]
) -> dict[tuple[str, Cell], list[float]]:
    """Return the metric with the recipe's rate by mixer and cell; empty where it is not tuned."""
    values: dict[tuple[str, Cell], list[float]] = {}
    if len(comparison.plan.rates) > 1:
        planned = {run.key for run in comparison.planned() if run.stage == "untuned"}
        more = [run for run in comparison.journal.finished("untuned") if run.key in planned]
        for run in [*(run for run in runs if run.factor == 1), *more]:
            values.setdefault((run.mixer, run.cell), []).append(run.value)
    return values


def _mean_gap(
    values: Mapping[tuple[str, Cell], Sequence[float]], label: str, baseline: str, sign: int
) -> float | None:
    """Return the mean difference of a mixer from the baseline over the cells of both."""
    cells = [cell for mixer, cell in values if mixer == label and (baseline, cell) in values]
    gaps = (np.mean(values[label, cell]) - np.mean(values[baseline, cell]) for cell in cells)
    return None if label == baseline else _mean(sign * gap for gap in gaps)


def _cell_record(
    comparison: Comparison,
    label: str,
    cell: CellPlan,
    runs: Sequence[Run],
    untuned: Mapping[tuple[str, Cell], Sequence[float]],
    errors: Errors,
    *,
    intervals: bool,
) -> Record:
    plan = comparison.plan
    ours = [run for run in runs if (run.mixer, run.cell) == (label, cell.key)]
    tuned = [run.value for run in comparison.tuned(label, cell.key)]
    network = cell.networks.get(label)
    values = [run.value for run in ours]
    low = high = math.nan
    if values and intervals:
        answers = read_answers(ours, plan.primary)
        ends = interval(values, *errors.of(label, cell.key), answers)
        low, high = np.clip(ends, *plan.bounds).tolist()
    notes = [cell.refused[label]] if label in cell.refused else []
    notes += cell.differing(label, plan) if network else []
    failed = [r for r in failed_runs(comparison) if (r.mixer, r.cell) == (label, cell.key)]
    notes += [f"{run.stage} seed {run.seed} failed: {run.reason}" for run in failed]
    costs = {name: getattr(network, name) if network else None for name in COSTS}
    return {
        "mixer": label, "host": cell.host, "data": cell.data,
        "metric": float(np.mean(values)) if values else None,
        "untuned": _mean(untuned.get((label, cell.key), ())),
        "interval": f"{low:.4g} to {high:.4g}" if math.isfinite(low) else None,
        "runs": len(values),
        "factor": ours[0].factor if ours else None,
        "sensitivity": max(tuned) - min(tuned) if len(tuned) > 1 else None,
        "ece": _mean(run.ece for run in ours if math.isfinite(run.ece)),
        **costs,
        "memory": _mean(run.memory for run in ours if math.isfinite(run.memory)),
        "note": "; ".join(notes) or None,
    }  # fmt: skip


def _notes(
    comparison: Comparison,
    ours: dict[str, Effect],
    wider: dict[str, Effect],
    runs: Sequence[Run],
    errors: Errors,
) -> list[str]:
    """Return the lines below the table."""
    plan, cells = comparison.plan, comparison.cells
    hosts, sets = ({cell.key[axis] for cell in cells} for axis in (0, 1))
    lines = [
        f"difference: from {plan.baseline} in {plan.primary}, mean over cells, above 0 is better; "
        f"within {plan.region:g} counts as none",
        "95 %: interval of the difference, for all rows together",
        f"within: on {counted(len(cells), 'cell')}, by the deviation of seeds (Dunnett)",
        *(["untuned: the difference with the recipe's rate"] if len(plan.rates) > 1 else []),
        f"beyond: on other hosts and data sets, by {counted(len(hosts), 'host')} and "
        f"{counted(len(sets), 'data set')} as clusters",
    ]
    lines += [f"{mixer}: its runs deviate more than the others', by an error of its own"
              for mixer in errors.outliers]  # fmt: skip
    with_runs = {run.mixer for run in runs}
    reasons = dict.fromkeys(wider[label].reason for label in wider if label in with_runs)
    lines += [f"nothing can be concluded beyond these cells: {why}" for why in reasons if why]
    for why in dict.fromkeys(ours[label].reason for label in ours if label in with_runs):
        labels = [label for label in ours if label in with_runs and ours[label].reason == why]
        lines += [f"{', '.join(labels)}: nothing can be concluded, as {why}"] if why else []
    again = ours.get(f"{plan.baseline} {AGAIN}")
    if again is not None and math.isfinite(again.low):
        passed = again.verdict not in ("better", "worse")
        lines.append(
            f"self-test: {plan.baseline} with other seeds is {again.verdict!r}"
            + ("" if passed else "; the table FAILED it, and its verdicts cannot be trusted")
        )
    for entry in comparison.mixers:
        for cell in cells:
            label, place = entry.label, _column(cell)
            if label in cell.refused:
                lines.append(f"{MISSING} {label} does not fit {place}: {cell.refused[label]}")
                continue
            if differing := cell.differing(label, plan):
                lines.append(f"{DAGGER} {label} has in {place} {'; '.join(differing)}")
            count = sum((run.mixer, run.cell) == (label, cell.key) for run in runs)
            if count < plan.seeds:
                lines.append(
                    f"{MISSING} {label}: {count} of {counted(plan.seeds, 'run')} in {place}"
                )
    lines += [f"failed: {run} ({run.reason})" for run in failed_runs(comparison)]
    lost = sum(not Path(run.folder).is_dir() for run in runs)
    if lost:
        lines.append(f"without curves and answers: {counted(lost, 'run folder')} moved or deleted")
    reused = sum(run.reused for run in runs)
    lines += [f"made before this comparison: {counted(reused, 'run')}"] if reused else []
    return lines
