"""Shared by all analyses: their registry, their input and their results.

An analysis is one file in ``kinds/``; its name is the command's argument. The first line of its
docstring is its summary. ``OPTIONS`` has the defaults of its own ``key=value`` arguments, and
``CHOICES`` the closed lists among them. ``analyse(subjects, options) -> Findings`` runs it.
Measurements of a network alone are in ``backbones/analysis/``. torch and matplotlib are imported
inside functions, so the help stays fast.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from backbones.options.suggestions import plural
from tasks.engine.family import Family
from tools.cli.tables import Columns, Record

if TYPE_CHECKING:
    from tools.analyses.subjects import Subject

KINDS = "tools.analyses.kinds"


@dataclass(frozen=True)
class Findings:
    """Results of an analysis.

    Attributes:
        rows: The numbers behind the figures, one line of the CSV file each.
        summary: A short table of them.
        columns: The table's columns: key -> heading and format of the values.
        figures: Matplotlib figures by file name.
        notes: Sentences printed below the table.
        files: Further texts to write, by file name.
    """

    rows: Sequence[Record]
    summary: Sequence[Record]
    columns: Columns
    figures: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Analysis:
    """One kind of analysis; see the package's docstring for its file.

    Attributes:
        name: Its argument on the command line.
        summary: Its line of the help.
        options: Its own arguments with their defaults.
        choices: The valid values of options that have a closed list.
        analyse: Runs it.
    """

    name: str
    summary: str
    options: Mapping[str, str]
    choices: Mapping[str, Sequence[str]]
    analyse: Callable[[Sequence[Subject], Mapping[str, str]], Findings]


def analyses() -> dict[str, Analysis]:
    """Load all analyses by name: every file of ``kinds/``."""
    package = importlib.import_module(KINDS)
    return {
        module.name: _read(module.name) for module in sorted(pkgutil.iter_modules(package.__path__))
    }


def check_applies(family: Family, name: str) -> None:
    """Check that a family defines an analysis.

    Raises:
        ValueError: Names those that it does.
    """
    if family.analysis(name) is None:
        names = ", ".join(family.analyses) or "none"
        subject = family.peculiarity or f"whose networks take {plural(family.modality)}"
        more = f" ({family.remedies[name]})" if name in family.remedies else ""
        raise ValueError(
            f"{name} does not apply to task={family.name}, {subject}{more}; its analyses: {names}"
        )


def find_analysis(name: str) -> Analysis:
    """Return the analysis with a name.

    Raises:
        ValueError: The name is unknown; the message suggests the nearest.
    """
    from backbones.options import unknown

    kinds = analyses()
    if name not in kinds:
        raise ValueError(unknown("analysis", name, list(kinds)))
    return kinds[name]


def _read(name: str) -> Analysis:
    module = importlib.import_module(f"{KINDS}.{name}")
    return Analysis(
        name=name,
        summary=(module.__doc__ or "").partition("\n")[0].rstrip("."),
        options=module.OPTIONS,
        choices=getattr(module, "CHOICES", {}),
        analyse=module.analyse,
    )
