"""What all analyses share: the table of them, what one is given and what it finds.

An analysis is one file in ``kinds/``: a docstring whose first line says what it shows, ``OPTIONS``
with the defaults of its own ``key=value`` arguments, maybe ``CHOICES`` for those with a closed
list, and ``analyse(subjects, options) -> Findings``. The file's name is what is typed. What it asks
of a network alone lies in ``backbones/analysis/``; torch and matplotlib are imported inside
functions, so that the help need not wait for them.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tasks.engine.family import Family
from tools.cli.tables import Columns, Record

if TYPE_CHECKING:
    from tools.analyses.subjects import Subject

KINDS = "tools.analyses.kinds"


@dataclass(frozen=True)
class Findings:
    """What an analysis found.

    Attributes:
        rows: The numbers behind the pictures, a line of the CSV file each.
        shown: A short table of them.
        columns: Of the table: key -> heading and how its values are written.
        figures: Matplotlib's figures by the names of their files.
        notes: Sentences to be said below the table.
        files: Further texts to write, by the names of the files.
    """

    rows: Sequence[Record]
    shown: Sequence[Record]
    columns: Columns
    figures: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Analysis:
    """One kind of analysis; see the package for the file that it comes from.

    Attributes:
        name: What is typed.
        summary: What it shows.
        options: Its own arguments with their defaults.
        choices: What an option may be, where that is a closed list.
        analyse: Finds it.
    """

    name: str
    summary: str
    options: Mapping[str, str]
    choices: Mapping[str, Sequence[str]]
    analyse: Callable[[Sequence[Subject], Mapping[str, str]], Findings]


def analyses() -> dict[str, Analysis]:
    """All analyses by name: every file of ``kinds/``."""
    package = importlib.import_module(KINDS)
    return {
        found.name: _read(found.name) for found in sorted(pkgutil.iter_modules(package.__path__))
    }


def check_applies(family: Family, name: str) -> None:
    """Refuse an analysis that a family does not define.

    Raises:
        ValueError: Names those that it does.
    """
    if family.analysis(name) is None:
        known = ", ".join(family.analyses) or "none"
        raise ValueError(
            f"{name} does not apply to task={family.name}, whose networks take "
            f"{family.modality}s; its analyses: {known}"
        )


def find_analysis(name: str) -> Analysis:
    """The analysis of a name.

    Raises:
        ValueError: There is none, with the nearest names.
    """
    from backbones.options import unknown

    known = analyses()
    if name not in known:
        raise ValueError(unknown("analysis", name, list(known)))
    return known[name]


def _read(name: str) -> Analysis:
    module = importlib.import_module(f"{KINDS}.{name}")
    return Analysis(
        name=name,
        summary=(module.__doc__ or "").partition("\n")[0].rstrip("."),
        options=module.OPTIONS,
        choices=getattr(module, "CHOICES", {}),
        analyse=module.analyse,
    )
