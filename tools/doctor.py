"""Print which packages are installed, missing or untested, and what to type.

Uses the standard library only:

    python tools/doctor.py          a table, then checks; status 1 if the core is not usable
    python tools/doctor.py --json   the same as JSON
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from importlib import util
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.cli.command import exit_with
from tools.installation.checks import FILES, Check, check_python, run_checks
from tools.installation.packages import IN_VENV, REPAIR, VENV, Package, list_packages, tasks_with


def core_is_fine(rows: Iterable[Package], checks: Iterable[Check]) -> bool:
    """Return True if the tasks that need no extra packages can run."""
    missing = any(row.group == "" and row.status == "missing" for row in rows)
    return not missing and not any(check.core and check.level == "problem" for check in checks)


def format_report(rows: list[Package], checks: list[Check]) -> str:
    """Format the table of packages, the checks, and a summary line."""
    table = [("package", "installed", "tested", "status", "needed for", "type")]
    for row in rows:
        cells = (row.name, row.installed or "-", row.tested, row.status, row.feature, row.remedy)
        table.append(cells)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(map(str.ljust, cells, widths)) for cells in table]
    lines.append("")
    for check in checks:
        lines.append(f"{check.level:8} {check.name}: {check.text}")
        if check.remedy:
            lines.append(f"{'':8} type: {check.remedy}")
    lines += ["", summary(rows, checks)]
    return "\n".join(line.rstrip() for line in lines)


def summary(rows: list[Package], checks: list[Check]) -> str:
    """Summarise in one line which tasks can run."""
    if not core_is_fine(rows, checks):
        if core_is_fine(rows, [check for check in checks if check.name != FILES]):
            return "Nothing can run until the file above is fixed."
        remedy = ".venv/bin/python tools/doctor.py" if VENV.exists() else REPAIR
        return f"Nothing can run with this Python. Type: {REPAIR if IN_VENV else remedy}"
    from tasks.engine.family import families

    lacking = {task for row in rows if row.status == "missing" and row.group
               for task in tasks_with(row.name, row.group)}  # fmt: skip
    if any(check.level == "problem" for check in checks):
        lacking |= {family.name for family in families().values() if family.needs}
    ready = [name for name in families() if name not in lacking]
    if not lacking:
        return f"All {len(ready)} tasks can run: {', '.join(ready)}."
    return f"Can run: {', '.join(ready)}. Need the above: {', '.join(sorted(lacking))}."


def main(arguments: list[str] | None = None) -> int:
    """Print the report; return 0 if the tasks that need no extra packages can run, else 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args(arguments)
    if util.find_spec("tomllib") is None:
        print(f"python: {check_python().text}. Type: {check_python().remedy}")
        return 1
    rows, checks = list_packages(), run_checks()
    fine = core_is_fine(rows, checks)
    if options.json:
        report = {"core_is_fine": fine, "packages": [asdict(row) for row in rows]}
        print(json.dumps({**report, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        print(format_report(rows, checks))
    return 0 if fine else 1


if __name__ == "__main__":
    exit_with(main)
