"""One self-contained HTML page per run.

It shows the final table with the paper's figures, curves, predictions, analyses and settings.
Analyses that do not apply to the run are listed with the reason.
"""

from __future__ import annotations

import logging
import re
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from tasks.engine.run_folder.atomic_writes import write_whole
from tasks.engine.run_folder.bounded_reading import read_yaml
from tasks.engine.run_folder.schemas import read_classes, read_summary
from tools.analyses import Analysis, Findings, analyses, check_applies
from tools.analyses.elements import (
    Section,
    document,
    figures,
    pairs,
    picture,
    table,
    text,
    tiles,
)
from tools.cli.printable import as_typed

if TYPE_CHECKING:
    from tools.analyses.subjects import Subject

# Keeps a page within minutes and megabytes; overrides the command's options.
SHORT = {
    "erf": {"images": "4", "image_size": ""},
    "coefficients": {"images": "32"},
    "errors": {"images": "512"},
    "similarity": {"images": "16"},
    "landscape": {"images": "16", "points": "5", "iterations": "5"},
    "attention": {"images": "3"},
    "cam": {"images": "4"},
    "attributions": {"images": "4", "steps": "20"},
}
REPORT = "report"  # the analysis that writes the page, and is not part of it
TILES = 3  # number of metrics at the top, next to parameters and operations
BESIDE = {
    "metric": ("metric", "{}"),
    "paper": ("paper", "{:.4g}"),
    "ours": ("ours", "{:.4g}"),
    "difference": ("difference", "{:+.2g}"),
}


def page(
    subject: Subject,
    options: Mapping[str, str],
    report: Callable[[str], None],
    names: Sequence[str] = (),
) -> str:
    """Return the page of a run.

    Args:
        subject: Opened from its run folder.
        options: The command's options; each analysis adds its own.
        report: Prints a line of progress.
        names: Names of analyses; default: all.

    Raises:
        ValueError: The subject is not from a run folder.
    """
    folder = subject.folder
    if folder is None:
        raise ValueError(
            f"{subject.label} is not from a run folder, but a report needs one: pass ckpt=<run "
            "folder>"
        )
    path = folder / "summary.json"
    summary = read_summary(path) if path.exists() else {}
    if summary.get("finished") is False:
        summary = {}
    curves = picture(folder / "curves.png", "losses and validation metrics by step")
    pictures = folder / "preview"
    previews = [] if pictures.is_symlink() else sorted(pictures.glob("*.png"))
    predictions = figures(
        (picture(path, f"predictions {path.stem}") for path in previews), halves=len(previews) > 1
    )
    sections = [
        Section("results", "Results", _results(folder, summary)),
        Section("curves", "Curves", curves or "<p>None were measured.</p>"),
        Section("predictions", "Predictions", predictions or "<p>None were drawn.</p>"),
        *_analyses(subject, options, report, names),
        Section("settings", "Settings", _settings(folder, summary)),
    ]
    return document(subject.label, _head(subject, folder, summary), sections)


def write_page(folder: Path) -> Path:
    """Write report.html into the folder of a finished run, and return its path."""
    from tools.analyses.subjects import open_subjects

    options = {
        "analysis": REPORT,
        "ckpt": str(folder),
        "backbone": "",
        "input": "",
        "images": "16",
        "image_size": "",
    }
    path = folder / "report.html"
    # The run has already logged its data, and its folder must stay its last line.
    data = logging.getLogger("datamodules")
    level = data.level
    data.setLevel(logging.WARNING)
    try:
        (subject,) = open_subjects(options, ())
        write_whole(path, page(subject, options, lambda line: None))
    finally:
        data.setLevel(level)
    return path


def _analyses(
    subject: Subject,
    options: Mapping[str, str],
    report: Callable[[str], None],
    names: Sequence[str],
) -> Iterator[Section]:
    refused = {}
    for name, analysis in analyses().items():
        if name == REPORT or (names and name not in names):
            continue
        report(f"{name} ...")
        title, rest = _divided(analysis.summary)
        command = as_typed(f"<code>python tools/analyse.py {name} ckpt=RUN</code>")
        about = f"{text(rest)} · {command}" if rest else command
        try:
            check_applies(subject.family, name)
            content = _analysis(subject, analysis, options)
        except ValueError as error:
            refused[name] = str(error)
        else:
            yield Section(name, title, content, about)
    if refused:
        yield Section("refused", "Analyses that do not apply", pairs(refused))


def _divided(summary: str) -> tuple[str, str]:
    """Split an analysis' summary into a heading and the rest."""
    title = re.split(r"[(:;]", summary)[0].strip()
    rest = summary.removeprefix(title).strip(" :;")
    is_bracketed = rest.startswith("(") and rest.find(")") == len(rest) - 1
    rest = rest[1:-1] if is_bracketed else rest
    return title, rest[:1].upper() + rest[1:]


def _analysis(subject: Subject, analysis: Analysis, options: Mapping[str, str]) -> str:
    settings = {**options, **analysis.options, **SHORT.get(analysis.name, {})}
    count, size = subject.count, subject.size
    subject.count = int(settings["images"])
    try:
        findings = analysis.analyse([subject], settings)
    finally:
        subject.count, subject.size = count, size
    # The page has one network, so its column is redundant.
    columns = {key: column for key, column in findings.columns.items() if key != "backbone"}
    notes = "".join(f"<p>{text(note)}</p>" for note in findings.notes)
    return figures([*_figures(findings), table(findings.summary, columns)]) + notes


def _figures(findings: Findings) -> Iterator[str]:
    from tools.analyses.writing import write_findings

    with tempfile.TemporaryDirectory() as folder:
        files = write_findings("numbers", findings, Path(folder))
        pictures = [path for path in files if path.suffix == ".png"]
        for path in pictures:
            name = path.stem.replace("_", " ")
            yield picture(path, name, name if len(pictures) > 1 else "")


def _head(subject: Subject, folder: Path, summary: Mapping[str, Any]) -> str:
    """Return the head of the page: the run and its main figures."""
    parts = [str(summary["task"])] if "task" in summary else []
    data = summary.get("data") or {}
    if "name" in data:
        counts = data.get("samples", {}).items()
        images = ", ".join(f"{n:,} for {part}" for part, n in counts if n is not None)
        parts.append(f"{data['name'].rpartition('.')[2]} ({images} {subject.family.unit})")
    facts = " · ".join([*parts, f"run {folder.name}"])
    first = dict(list(_metrics(summary).items())[:TILES])
    costs = _cost(summary)
    if costs:
        operations, _, size = costs["backbone MACs"].partition(" at ")
        first["parameters"] = costs["parameters"].partition(" (")[0]
        first[f"backbone MACs at {size}"] = operations
    return f'<h1>{text(subject.label)}</h1>\n<p class="facts">{text(facts)}</p>\n{tiles(first)}'


def _results(folder: Path, summary: Mapping[str, Any]) -> str:
    from tools.runs.report import CLASSES, describe_left_out

    if not summary:
        return "<p>The results follow when the run has ended.</p>"
    results = pairs(_metrics(summary) | describe_left_out(summary) | _cost(summary))
    return figures([results, _paper_comparison(summary), _class_metrics(folder / CLASSES)])


def _metrics(summary: Mapping[str, Any]) -> dict[str, str]:
    return {name: f"{value:.4g}" for name, value in summary.get("metrics", {}).items()}


def _paper_comparison(summary: Mapping[str, Any]) -> str:
    paper = summary.get("paper")
    if not paper:
        return ""
    rows = [
        {"metric": name, "difference": None, **values} for name, values in paper["metrics"].items()
    ]
    why = f"<p>They do not compare: {text(paper['why_not'])}</p>" if "why_not" in paper else ""
    ordered = [{key: row[key] for key in BESIDE} for row in rows]
    return f"<div><h3>Beside {text(paper['row'])}</h3>\n{table(ordered, BESIDE)}{why}</div>"


def _class_metrics(path: Path) -> str:
    """Return the metrics of each class, if the run has them."""
    if not path.exists():
        return ""
    records = read_classes(path)
    first, *names = records[0] if records else ["class"]
    columns = {first: (first, "{}"), **{name: (name, "{:.4g}") for name in names}}
    return f"<div><h3>By class</h3>\n{table(records, columns)}</div>"


def _settings(folder: Path, summary: Mapping[str, Any]) -> str:
    """Return the typed command and all settings of the run."""
    command = as_typed(shlex.join(["python", "tools/run.py", *summary.get("overrides", ())]))
    settings = text(yaml.safe_dump(read_yaml(folder / "config.yaml"), sort_keys=False))
    return f"<pre>{text(command)}</pre>\n<pre>{settings}</pre>"


def _cost(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return the size and speed of a run; empty for runs of older versions."""
    from tools.runs.report import describe_cost

    return describe_cost(summary) if {"macs_at", "backbone_parameters"} <= summary.keys() else {}
