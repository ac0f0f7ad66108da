"""A comparison from its plan to its files."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tools.cli.printable import counted, printable
from tools.cli.tables import write
from tools.comparison.cells import CellPlan, compose_run, measure_cell, note_data, run_words
from tools.comparison.journal import Journal, Run
from tools.comparison.page import write_files
from tools.comparison.plan import (
    Entry,
    Plan,
    data_entries,
    host_entries,
    mixer_entries,
)
from tools.comparison.register import (
    Registered,
    fixed_entries,
    keep_labels,
    keep_lengths,
    locked,
    read_cell,
    read_registered,
    register,
    write_cell,
    write_registered,
)
from tools.comparison.runner import Comparison
from tools.comparison.statistics import estimate_errors, visible_difference
from tools.comparison.table import DAGGER, Table, chosen_runs, failed_runs, make_table
from tools.comparison.workers import ending_by_signals, make_workers
from tools.runs.source import read_source

ASSUMED = 0.5  # deviation of a seed where nothing is known, in points


def compare(plan: Plan, only: str = "") -> None:
    """Check a plan, print its cost, register it, do its runs and write its files.

    Args:
        plan: The plan.
        only: "plan" stops before the first run, "table" writes the files of the runs that ended.

    Raises:
        ValueError: The plan cannot be followed.
    """
    mixers, hosts, data = mixer_entries(plan), host_entries(plan), data_entries(plan)
    baseline = next(entry for entry in mixers if entry.label == plan.baseline)
    for host in hosts:  # a wrong word of the last cell ends the command before the first is timed
        for entry in data:
            compose_run(run_words(plan, host, entry, baseline))
    with locked(plan.folder):
        commit = read_source().commit
        journal = Journal(plan.folder)
        begun = bool(journal.runs) or (plan.folder / "runs").exists()
        registered = read_registered(plan.folder) if begun else None
        before = None if registered is None else registered.plan
        if registered is not None:
            registered = keep_labels(plan, registered, journal)
        cells = [_measured(plan, host, entry, mixers, commit) for host in hosts for entry in data]
        check_mixers(plan, cells)
        keep_lengths(plan, cells, registered)
        comparison = Comparison(plan, mixers, hosts, data, cells, plan.folder, journal, say)
        outdated = comparison.outdated(before)
        earlier = comparison.made_before()
        describe_plan(comparison, earlier)
        if only == "plan":
            return
        settings = fixed_entries(plan, mixers, cells, commit)
        if only == "table" and registered is None:
            raise ValueError(f"{plan.folder} has no runs yet; leave only=table out")
        if outdated:  # before the plan changes, by which another command would tell them
            journal.write()
        registered = register(plan.folder, plan, settings, registered, begun=begun)
        if outdated:
            lines = [*registered.deviations, *outdated]
            registered = registered.model_copy(update={"deviations": lines})
            write_registered(plan.folder, registered)
        if only != "table":
            for run in earlier:
                journal.add(run)
            run_plan(comparison)
        finish(comparison, registered)


def say(line: str) -> None:
    """Print a line at once."""
    print(printable(line), flush=True)


def _measured(
    plan: Plan, host: Entry, data: Entry, mixers: Sequence[Entry], commit: str | None
) -> CellPlan:
    words = [run_words(plan, host, data, mixer) for mixer in mixers]
    words += [[plan.budget], [mixer.label for mixer in mixers]]
    cell = read_cell(plan.folder, words, commit)
    if cell is None:
        say(f"measuring {len(mixers)} networks of {host.label} on {data.label}")
        cell = measure_cell(plan, host, data, mixers)
        write_cell(plan.folder, words, commit, cell)
    else:
        cell.host, cell.data = host.label, data.label
        note_data(plan, host, data, cell)
    for label, reason in cell.refused.items():
        say(f"  {label} does not fit: {reason}")
    return cell


def check_mixers(plan: Plan, cells: Sequence[CellPlan]) -> None:
    """Raise ValueError if a mixer of the plan fits none of its cells, as a misspelt one."""
    for mixer in plan.mixer:
        reasons = [cell.refused.get(mixer) for cell in cells]
        if all(reasons):
            raise ValueError(f"mixer={mixer} fits no host of the plan: {reasons[0]}")


def describe_plan(comparison: Comparison, earlier: Sequence[Run]) -> None:
    """Print runs, cost and the smallest difference that the plan can show.

    Args:
        comparison: The plan.
        earlier: Runs that were made before.
    """
    plan, cells = comparison.plan, comparison.cells
    planned = list(comparison.planned())
    keys = {run.key for run in earlier}
    open_runs = [run for run in comparison.remaining() if run.key not in keys]
    for run in earlier:
        say(f"made before: {run}  {run.folder}")
    seconds = sum(comparison.estimate(run) for run in open_runs) / plan.jobs
    tuning = sum(run.stage == "tune" for run in planned)
    count_done = len(planned) - len(open_runs)
    part = f", {tuning} of them to choose rates" if tuning else ""
    say(f"{counted(len(planned), 'run')}{part}; {count_done} done, {format_seconds(seconds)} left")
    if tuning:
        say("  where another rate than the recipe's is chosen, the recipe's is run as well")
    for mixer in comparison.mixers:
        lines = [
            f"  {DAGGER} {mixer.label} in {cell.host}: {line}"
            for cell in cells
            if mixer.label in cell.networks
            for line in cell.differing(mixer.label, plan)
        ]
        for line in dict.fromkeys(lines):
            say(line)
    deviation, source = expected_deviation(comparison)
    rows = {label for cell in cells for label in cell.networks}
    size = visible_difference(max(1, len(rows) - 1), len(cells), plan.seeds)
    say(
        f"smallest difference that it can show within {counted(len(cells), 'cell')}: {size:.2f} "
        "deviations of a seed"
    )
    say(
        f"  {size * deviation:.3g} in {plan.primary} if a seed deviates by {deviation:.3g} "
        f"({source}); 80 % power, 5 % for all rows"
    )
    single = [
        f"1 {name}"
        for axis, name in enumerate(("host", "data set"))
        if len({cell.key[axis] for cell in cells}) == 1
    ]
    if single:
        say(f"beyond these cells nothing can be concluded: {' and '.join(single)}")


def expected_deviation(comparison: Comparison) -> tuple[float, str]:
    """Return a seed's deviation in the metric's unit, and where it is from."""
    plan = comparison.plan
    if plan.deviation is not None:
        return plan.deviation, "deviation="
    values: dict[str, dict[tuple[str, str], list[float]]] = {}
    for run in chosen_runs(comparison):
        values.setdefault(run.mixer, {}).setdefault(run.cell, []).append(run.value)
    variances = [variance for variance, _ in estimate_errors(values).pooled.values()]
    if any(variances):
        return float(np.sqrt(np.mean(variances))), "of its runs so far"
    return plan.region or ASSUMED, "assumed; pass deviation="


def run_plan(comparison: Comparison, *, tables: bool = True) -> None:
    """Do the runs that are missing, in the order of the plan; failed ones are tried again.

    Args:
        comparison: The plan.
        tables: Print the standing table after each cell.
    """
    plan = comparison.plan
    workers = make_workers(plan)
    started: list[Run] = []
    with ending_by_signals():
        try:
            for number, planned in enumerate(comparison.planned(), start=1):
                # The rate of a run is chosen by those before it.
                waits = planned.stage == "final" and any(run.stage == "tune" for run in started)
                for result in workers.results(0 if waits else plan.jobs - 1):
                    _note(comparison, result)
                started = started if workers.processes else []
                run = comparison.settled(planned)
                if run is None:
                    failed = {"status": "failed", "reason": "no rate of its mixer gave a result"}
                    comparison.journal.add(planned.model_copy(update=failed))
                    continue
                if comparison.journal.completed(run) is not None:
                    continue
                step = (started[-1].cell, started[-1].stage) if started else None
                if tables and step not in (None, (run.cell, run.stage)):
                    show(make_table(comparison, intervals=False))
                seconds = sum(comparison.estimate(later) for later in comparison.remaining())
                total = len(list(comparison.planned()))  # grows with the rates that are chosen
                say(f"{number} of {total}: {run} ({format_seconds(seconds / plan.jobs)} left)")
                earlier = comparison.start(run, workers)
                if earlier is not None:
                    _note(comparison, earlier)
                else:
                    started.append(run)
            for result in workers.results(0):
                _note(comparison, result)
        except BaseException:
            workers.stop()
            raise


def _note(comparison: Comparison, run: Run) -> None:
    """Keep a run that ended, and print its result."""
    comparison.journal.add(run)
    name = f"{run}: " if comparison.plan.jobs > 1 else ""
    if run.status == "failed":
        say(f"  {name}failed: {run.reason}")
    else:
        earlier = ", made before" if run.reused else ""
        say(f"  {name}{comparison.plan.primary} {run.value:.4g}{earlier}  {run.folder}")


def show(table: Table) -> None:
    """Print the claims of a table as it stands; its files have all columns."""
    write(table.records, "table", {key: table.columns[key] for key in table.brief})


def finish(comparison: Comparison, registered: Registered) -> None:
    """Write the files, and print the table with its notes.

    Raises:
        ValueError: All runs failed.
    """
    table = make_table(comparison)
    write_files(comparison, table, registered)
    show(table)
    for line in table.notes:
        say(line)
    for line in registered.deviations:
        say(f"deviation from the plan: {line}")
    say(f"plan {registered.hash}")
    say(f"Report: {comparison.folder / 'report.html'}")
    failed = failed_runs(comparison)
    if failed and not chosen_runs(comparison):
        raise ValueError(f"no run gave a result; {failed[0]}: {failed[0].reason}")


def format_seconds(seconds: float) -> str:
    """Format a duration as ``2 h 05 min``, ``3 min`` or ``20 s``."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min"
