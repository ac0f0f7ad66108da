"""Averages over the option whose values papers average, such as the horizons of forecasts."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from tasks.engine.family import Family, families, imported
from tools.cli.tables import Columns, Record, write
from tools.comparing.evaluations import data_name
from tools.comparing.run_records import RunRecord
from tools.comparing.table import setting
from tools.papers.experiments import experiments


def show_averages(runs: Sequence[RunRecord], by: Sequence[str]) -> None:
    """Print the averages of a sweep over ``Family.averaged``, beside the paper's if they compare.

    Args:
        runs: The finished runs of the sweep, or the tests of one without trainings.
        by: Settings that differ between the runs.
    """
    for task in dict.fromkeys(run.task for run in runs):
        family, task_runs = families()[task], [run for run in runs if run.task == task]
        values = {str(run.config.get(family.averaged)) for run in task_runs}
        if family.averaged in by or (family.averaged and len(values) > 1):
            labels = [key for key in by if key not in (family.averaged, "data", "seed", "ckpt")]
            records = average_records(task_runs, labels, family)
            print()
            write(records, "table", _columns(records))


def average_records(runs: Sequence[RunRecord], by: Sequence[str], family: Family) -> list[Record]:
    """Return a record for each data set and setting, and one over all data sets if several.

    Args:
        runs: Finished runs of one family.
        by: Further settings that distinguish records.
        family: The family, with ``averaged`` and ``averaged_values``.
    """
    groups: dict[tuple[str, ...], dict[str, list[RunRecord]]] = {}
    for run in runs:
        settings = tuple(str(setting(run, key)[1]) for key in ("backbone", *by))
        groups.setdefault(settings, {}).setdefault(data_name(run), []).append(run)
    records = []
    for settings, sets in groups.items():
        columns = dict(zip(("backbone", *by), settings, strict=True))
        averages = {name: _average(group, family) for name, group in sets.items()}
        records += [
            {"data": name, **columns, **_facts(group, family), **averages[name]}
            for name, group in sets.items()
        ]
        if len(sets) > 1:
            over = {key: fmean(mean[key] for mean in averages.values()) for key in _metrics(family)}
            first = next(iter(sets.values()))
            records.append({"data": f"all {len(sets)}", **columns, **_facts(first, family), **over})
    for record, claim in zip(records, _claims(runs, records), strict=True):
        record |= claim
    return records


def _metrics(family: Family) -> list[str]:
    return [metric.name for metric in family.metrics if metric.published]


def _facts(runs: Sequence[RunRecord], family: Family) -> Record:
    values = sorted({int(run.config[family.averaged]) for run in runs})
    return {family.averaged: ", ".join(map(str, values))}


def _average(runs: Sequence[RunRecord], family: Family) -> dict[str, float]:
    """Return the mean over the option's values, each of them the mean of its runs, and pooled."""
    values = sorted({run.config[family.averaged] for run in runs})
    parts = [[run for run in runs if run.config[family.averaged] == value] for value in values]
    figures = {
        name: fmean(fmean(run.metrics[name] for run in part) for part in parts)
        for name in _metrics(family)
    }
    if family.pooled and all("counts" in run.summary for run in runs):
        counts = [[run.summary["counts"] for run in part] for part in parts]
        pooled = imported(family.pooled)(counts)
        figures |= {f"pooled {name}": pooled[name] for name in _metrics(family)}
    return figures


def _claims(runs: Sequence[RunRecord], records: Sequence[Record]) -> list[Record]:
    """Return the figures of the row that the runs of each record claim."""
    names = {str(run.config.get("paper.experiment")) for run in runs}
    rows = [row for name, row in experiments().items() if name in names]
    if len(rows) != 1:
        return [{} for _ in records]
    row = rows[0]
    family = families()[row.task]
    values = ", ".join(map(str, family.averaged_values))
    sets = {str(record["data"]) for record in records}
    place = f"all {len(row.train.also)}" if row.train.also else row.train.data
    complete = not row.train.also or {*row.train.also} <= sets
    claims = []
    for record in records:
        fits = record["data"] == place and record[family.averaged] == values and complete
        claims.append({f"paper {key}": row.metrics[key] for key in row.metrics} if fits else {})
    return claims


def _columns(records: Sequence[Record]) -> Columns:
    names = dict.fromkeys(name for record in records for name in record)
    return {
        name: (name, "{:.4g}" if any(isinstance(row.get(name), float) for row in records) else "{}")
        for name in names
    }
