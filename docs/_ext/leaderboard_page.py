"""The leaderboard: verdicts, cells and errors from the CSVs of docs/leaderboard."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from markup import table

from tools.cli.printable import counted
from tools.comparison.leaderboard import FOLDER, Leaderboard, file_name, read_leaderboard
from tools.comparison.plan import AGAIN, CONTROLS, OWN, Plan
from tools.comparison.register import PLAN
from tools.comparison.statistics import (
    Cell,
    Effect,
    beyond,
    estimate_errors,
    mean_ranks,
    visible_within,
    within,
)
from tools.comparison.table import DAGGER, MISSING

TITLE = "# Leaderboard"
INTRODUCTION = """Mixers of one kind, compared by `tools/compare.py`: all rows of a cell with the
same data, batches, length and first weights of the host. [Comparing mixers](../howto/compare.md)
explains the verdicts, and how a mixer of yours gets its row. Click on a heading to sort.

It shows these mixers in small hosts, trained from scratch for a short time. ImageNet, models of
usual size and pretraining are beyond it, and the order of mixers may differ there."""
LEGEND = """* difference: from {baseline} in {metric}, mean over cells, above 0 is better
* 95 %: interval of the difference, for all rows together
* within: verdict about these cells, by the deviation of seeds (Dunnett); differences up to
  {region:g} count as none
* beyond: verdict about other hosts and data sets, with hosts and data sets as clusters
* rank: mean over cells, 1 for the best
* sensitivity: best minus worst learning rate on held-out training samples, where rates were tuned
* parameters, MACs: over those of {baseline}, geometric mean over cells
* {dagger} the mixer forces other terms on the host than {baseline}, listed below
* {missing} cells or runs are missing that others have; the mixer is compared on its own cells"""


def pages(folder: Path = FOLDER) -> dict[str, str]:
    """Return the page, with a part for each leaderboard in the folder; none before the first."""
    parts = []
    for path in sorted(folder.rglob(PLAN), key=lambda path: (len(path.parts), path)):
        leaderboard = read_leaderboard(path.parent)
        if leaderboard is not None and leaderboard.plan.baseline in leaderboard.values():
            name = path.parent.relative_to(folder).as_posix()
            place = f"../{folder.name}" + (f"/{name}" if name != "." else "")
            sections = _parts(leaderboard, place)
            if name != ".":
                sections = [f"## {name}", *(_lowered(section) for section in sections)]
            parts += sections
    return {"leaderboard": "\n\n".join([TITLE, INTRODUCTION, *parts]) + "\n"} if parts else {}


def _lowered(section: str) -> str:
    """Return a section of a part of the page, with its heading a level below the part's."""
    return f"#{section}" if section.startswith("## ") else section


def _parts(leaderboard: Leaderboard, place: str) -> list[str]:
    plan, values = leaderboard.plan, leaderboard.values()
    ours = within(values, plan.baseline, plan.region, plan.sign)
    wider = beyond(values, plan.baseline, plan.region, plan.sign)
    legend = LEGEND.format(
        baseline=plan.baseline,
        metric=plan.primary,
        region=plan.region,
        missing=MISSING,
        dagger=DAGGER,
    )
    return [
        _summary(leaderboard, ours),
        *_notes(place),
        "## Verdicts",
        _verdicts(leaderboard, place, ours, wider),
        legend,
        *_terms(leaderboard),
        "## Cells",
        f"Mean of {plan.primary} over the runs of a cell.",
        _cells(leaderboard),
        "## Error of a cell",
        _deviations(leaderboard),
        "## Plans",
        _plans(leaderboard, place),
    ]


def _summary(leaderboard: Leaderboard, ours: dict[str, Effect]) -> str:
    plan, values = leaderboard.plan, leaderboard.values()
    rows = list(leaderboard.finals())
    devices = sorted({f"{row.device}, {row.precision}" for row in rows})
    planned = {label: 0 for label in plan.mixer} | {label: 0 for label in values}
    cells = leaderboard.cells
    missing = sum(cell not in values.get(label, {}) for label in planned for cell in cells)
    lines = [
        f"{counted(len(rows), 'run')} of {counted(len(values), 'mixer')} in "
        f"{counted(len(cells), 'cell')} on {'; '.join(devices)}"
        + (f"; {counted(missing, 'cell')} of a mixer missing" if missing else "")
    ]
    visible = visible_within(values, plan.baseline)
    if math.isfinite(visible):
        lines.append(
            f"Smallest visible difference within the cells: {visible:.2g} in {plan.primary} (80 % "
            "power, 5 % for all rows)"
        )
    again = ours.get(f"{plan.baseline} {AGAIN}")
    if again is not None and math.isfinite(again.low):
        passed = again.verdict not in ("better", "worse")
        lines.append(
            f"Self-test: {plan.baseline} with other seeds is '{again.verdict}'"
            + ("" if passed else "; the table FAILED it, and its verdicts cannot be trusted")
        )
    changed = sum("dirty" in row.commit for row in rows)
    if changed:
        lines.append(f"{counted(changed, 'run')} with uncommitted changes of the code")
    return "\n".join(f"* {line}" for line in lines)


def _notes(place: str) -> list[str]:
    """Return what the folder's notes.txt says about how its runs were made."""
    path = FOLDER / place.partition(f"../{FOLDER.name}")[2].strip("/") / "notes.txt"
    return [path.read_text(encoding="utf-8").strip()] if path.exists() else []


def _verdicts(
    leaderboard: Leaderboard, place: str, ours: dict[str, Effect], wider: dict[str, Effect]
) -> str:
    plan, values = leaderboard.plan, leaderboard.values()
    ranks, cells = mean_ranks(values, plan.sign), leaderboard.cells
    rows = []
    measured = {cell for of_cells in values.values() for cell in of_cells}
    tuned, places = any(row.stage == "tune" for row in leaderboard.rows.values()), _places(plan)
    differences = {label: effect.mean for label, effect in ours.items() if effect.cells}
    order = sorted(values, key=lambda label: differences.get(label, 0.0), reverse=True)
    for label in order:
        effect, outside = ours.get(label), wider.get(label)
        mark = f" {DAGGER}" if _differing(leaderboard, label) else ""
        fewest = min((len(values[label].get(cell, ())) for cell in measured), default=0)
        mark += f" {MISSING}" if fewest < plan.seeds else ""
        known = effect is not None and math.isfinite(effect.low)
        rows.append([
            f"[{label}]({place}/{file_name(label)}){mark}",
            f"{effect.mean:+.{places}f}" if effect is not None and effect.cells else "",
            f"{effect.low:+.{places}f} to {effect.high:+.{places}f}" if known and effect else "",
            effect.verdict if effect else "baseline",
            outside.verdict if outside else "baseline",
            f"{ranks[label]:.1f}",
            *(_ratio(leaderboard, label, name) for name in ("parameters", "macs")),
            len([cell for cell in cells if values[label].get(cell)]),
            sum(map(len, values[label].values())),
            *([_sensitivity(leaderboard, label)] if tuned else []),
            _role(plan.baseline, label),
        ])  # fmt: skip
    head = ["mixer", "difference", "95 %", "within", "beyond", "rank", "parameters", "MACs",
            "cells", "runs", *(["sensitivity"] if tuned else []), "control"]  # fmt: skip
    return table(head, rows)


def _differing(leaderboard: Leaderboard, label: str) -> dict[str, str]:
    """Return a mixer's terms by host, where they are others than the baseline's."""
    terms = {(row.mixer, row.cell): row.terms for row in leaderboard.finals()}
    baseline = leaderboard.plan.baseline
    return {
        cell[0]: terms[label, cell]
        for cell in leaderboard.cells
        if terms.get((label, cell), "") != terms.get((baseline, cell), "")
        and (label, cell) in terms
        and (baseline, cell) in terms
    }


def _terms(leaderboard: Leaderboard) -> list[str]:
    """Return the list of mixers with other terms."""
    lines = [
        f"* {DAGGER} {label} in {host}: {text}"
        for label in leaderboard.mixers
        for host, text in _differing(leaderboard, label).items()
    ]
    return ["\n".join(lines)] if lines else []


def _sensitivity(leaderboard: Leaderboard, label: str) -> str:
    """Return the best minus the worst rate's metric on held-out samples, mean over cells."""
    tuned: dict[Cell, list[float]] = {}
    for row in leaderboard.rows.values():
        if row.stage == "tune" and row.mixer == label:
            tuned.setdefault(row.cell, []).append(row.value)
    return _mean([max(values) - min(values) for values in tuned.values()], leaderboard.plan)


def _role(baseline: str, label: str) -> str:
    if label == f"{baseline} {AGAIN}":
        return "the baseline, other seeds"
    if label == OWN:
        return "the host's own mixer"
    return "control" if label in CONTROLS else ""


def _ratio(leaderboard: Leaderboard, label: str, name: str) -> str:
    """Return the geometric mean of a size over the baseline's."""
    sizes = {(row.mixer, row.cell): getattr(row, name) for row in leaderboard.finals()}
    baseline = leaderboard.plan.baseline
    pairs = [
        (sizes[label, cell], sizes[baseline, cell])
        for cell in leaderboard.cells
        if (label, cell) in sizes and (baseline, cell) in sizes
    ]
    logs = [math.log(size / base) for size, base in pairs if size and base]
    return f"{math.exp(float(np.mean(logs))):.2f}" if logs else ""


def _cells(leaderboard: Leaderboard) -> str:
    values, cells = leaderboard.values(), list(leaderboard.cells)
    rows = [
        [label, *(_mean(values[label].get(cell, ()), leaderboard.plan) for cell in cells)]
        for label in values
    ]  # fmt: skip
    return table(["mixer", *(f"{host} on {data}" for host, data in cells)], rows)


def _mean(values: Sequence[float], plan: Plan) -> str:
    return f"{np.mean(values):.{_places(plan)}f}" if len(values) else ""


def _places(plan: Plan) -> int:
    """Return the decimal places in which a tenth of the region of equivalence is seen."""
    return max(2, 1 - math.floor(math.log10(plan.region))) if plan.region else 2


def _deviations(leaderboard: Leaderboard) -> str:
    errors, places = estimate_errors(leaderboard.values()), _places(leaderboard.plan)
    variances = errors.pooled
    samples = {row.cell: row.samples for row in leaderboard.finals()}
    rows = [
        [
            *cell,
            f"{samples[cell]:,}" if cell in samples else "",
            f"{math.sqrt(variances[cell][0]):.{places}f}" if cell in variances else "",
            variances[cell][1] if cell in variances else "",
        ]
        for cell in leaderboard.cells
    ]
    heads = ["host", "data", "test samples", "deviation of a seed", "degrees of freedom"]
    lines = [
        f"* The runs of {mixer} deviate more than the others', by an error of its own: "
        + ", ".join(f"{math.sqrt(variance):.{places}f}" for variance, _ in of_cells.values())
        for mixer, of_cells in errors.outliers.items()
    ]
    return "\n".join([table(heads, rows), "", *lines]).strip()


def _plans(leaderboard: Leaderboard, place: str) -> str:
    lines = [f"All rows follow [{PLAN}]({place}/{PLAN})."]
    commits = sorted({row.commit or "unknown" for row in leaderboard.rows.values()})
    lines.append(f"Commits: {', '.join(commits)}.")
    for entry in leaderboard.publications:
        lines.append(f"\n* {entry.hash}, registered {entry.time}")
        lines += [f"  * deviation: {line}" for line in entry.deviations]
        lines += [f"  * differs: {line}" for line in entry.differences]
    return "\n".join(lines)
