"""One self-contained HTML page of a run: settings, curves, predictions and all analyses.

only=cam,entropy shows these analyses alone. Analyses that do not apply to the run give the reason
in one sentence. They use fewer images than on their own, so a page takes minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tools.analyses import Findings, find_analysis

if TYPE_CHECKING:
    from tools.analyses.subjects import Subject

OPTIONS = {"only": ""}


def analyse(subjects: Sequence[Subject], options: Mapping[str, str]) -> Findings:
    """Write a page per run: report.html, numbered if there are several."""
    from tools.analyses.page import page

    names = [name for name in options["only"].split(",") if name]
    for name in names:
        find_analysis(name)
    pages = {}
    for place, subject in enumerate(subjects, start=1):
        name = "report.html" if len(subjects) == 1 else f"report_{place}.html"
        pages[name] = page(subject, options, lambda line: print(line, file=sys.stderr), names)
    return Findings([], [], {}, files=pages)
