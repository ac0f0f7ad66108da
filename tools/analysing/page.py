"""One HTML page of a run that needs no other file and no network.

What is in it: settings, curves, the closing table with the paper's figures, predictions, and every
analysis that applies to the run, or the sentence in which it is refused.
"""

from __future__ import annotations

import base64
import html
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from tools.analysing import Analysis, Findings, analyses

if TYPE_CHECKING:
    from tools.analysing.subjects import Subject

# What keeps a page within minutes and megabytes; what is typed to the command replaces it.
SHORT = {
    "erf": {"images": "4", "image_size": ""},
    "coefficients": {"images": "32"},
    "errors": {"images": "512"},
    "similarity": {"images": "16"},
    "landscape": {"images": "16", "points": "5", "iterations": "5"},
    "attention": {"images": "3"},
    "cam": {"images": "4"},
}
REPORT = "report"  # the analysis that makes the page, and is not in it
MOST_ROWS = 40  # of a table; the rest is in the CSV of the analysis itself
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem;
  color: #222; }
h1 { font-size: 1.6rem } h2 { margin-top: 2.5rem; border-bottom: 1px solid #ddd }
img { max-width: 100%; height: auto } figure { margin: 1rem 0 }
table { border-collapse: collapse; font-size: 13px } td, th { padding: 2px 10px; text-align: left }
tr:nth-child(even) { background: #f6f6f6 } pre { background: #f6f6f6; padding: 1rem;
  overflow-x: auto; font-size: 12px } .refused { color: #777 }
"""


def page(
    subject: Subject,
    options: Mapping[str, str],
    say: Callable[[str], None],
    chosen: Sequence[str] = (),
) -> str:
    """The page of a run.

    Args:
        subject: Opened from its run folder.
        options: What was typed for the command: the rest is each analysis' own.
        say: Takes a line about what is being done.
        chosen: Names of analyses; all by default.

    Raises:
        ValueError: The subject comes from no run folder.
    """
    folder = subject.folder
    if folder is None:
        raise ValueError(
            f"{subject.label} comes from no run folder, and a report is of one: pass ckpt=<run "
            "folder>"
        )
    summary = _json(folder / "summary.json")
    parts = [
        f"<h1>{_text(subject.label)}: {_text(str(summary.get('task', '')))}</h1>",
        f"<p>{_text(folder.name)}</p>",
        _section("Results", _results(summary)),
        _section("Curves", _picture(folder / "curves.png", "losses and validation metrics")),
        _section("Predictions", "".join(
            _picture(path, path.stem) for path in sorted((folder / "preview").glob("*.png"))
        )),
    ]  # fmt: skip
    parts += _analyses(subject, options, say, chosen)
    parts.append(_section("Settings", f"<pre>{_text(_settings(folder))}</pre>"))
    title = f"<title>{_text(subject.label)}</title>"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{title}'
        f"<style>{STYLE}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def write_page(folder: Path) -> Path:
    """Write report.html into the folder of a run that has ended, and return its path."""
    from tools.analysing.subjects import open_subjects

    typed = {"ckpt": str(folder), "backbone": "", "input": "", "images": "16", "image_size": ""}
    (subject,) = open_subjects(typed, ())
    path = folder / "report.html"
    path.write_text(page(subject, typed, lambda line: None), encoding="utf-8")
    return path


def _analyses(
    subject: Subject, options: Mapping[str, str], say: Callable[[str], None], chosen: Sequence[str]
) -> Iterator[str]:
    for name, analysis in analyses().items():
        if name == REPORT or (chosen and name not in chosen):
            continue
        say(f"{name} ...")
        yield _section(analysis.summary, _analysis(subject, analysis, options))


def _analysis(subject: Subject, analysis: Analysis, options: Mapping[str, str]) -> str:
    own = {**options, **analysis.options, **SHORT.get(analysis.name, {})}
    count, size = subject.count, subject.size
    subject.count = int(own["images"])
    try:
        found = analysis.analyse([subject], own)
    except ValueError as error:
        return f'<p class="refused">Does not apply: {_text(str(error))}</p>'
    finally:
        subject.count, subject.size = count, size
    return "".join(_figures(found)) + _table(found)


def _figures(found: Findings) -> Iterator[str]:
    from tools.analysing.writing import write_findings

    with tempfile.TemporaryDirectory() as folder:
        written = write_findings("numbers", found, Path(folder))
        for path in written:
            if path.suffix == ".png":
                yield _picture(path, path.stem)


def _table(found: Findings) -> str:
    if not found.shown:
        return ""
    columns = {key: found.columns[key] for key in found.shown[0] if key in found.columns}
    head = "".join(f"<th>{_text(heading)}</th>" for heading, _ in columns.values())
    lines = []
    for record in found.shown[:MOST_ROWS]:
        values = [(record[key], form) for key, (_, form) in columns.items()]
        cells = ["-" if value is None else form.format(value) for value, form in values]
        lines.append("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in cells) + "</tr>")
    more = len(found.shown) - MOST_ROWS
    rest = f"<p>... and {more} more rows</p>" if more > 0 else ""
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>{rest}"


def _results(summary: Mapping[str, Any]) -> str:
    paper = summary.get("paper") or {}
    rows = [
        (name, f"{value:.4g}" if isinstance(value, float) else str(value))
        for name, value in {**_facts(summary), **summary.get("metrics", {})}.items()
    ]
    lines = "".join(f"<tr><td>{_text(k)}</td><td>{_text(v)}</td></tr>" for k, v in rows)
    text = f"<table>{lines}</table>"
    if paper:
        compared = "".join(
            f"<tr><td>{_text(str(k))}</td><td>{_text(str(v))}</td></tr>" for k, v in paper.items()
        )
        text += f"<h3>Beside the paper</h3><table>{compared}</table>"
    return text


def _facts(summary: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("backbone", "parameters", "backbone_macs", "macs_at", "seed", "seconds")
    return {key: summary[key] for key in keys if key in summary}


def _settings(folder: Path) -> str:
    """The settings of a run, as its folder has them."""
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    return yaml.safe_dump(config, sort_keys=False)


def _json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return content


def _section(title: str, content: str) -> str:
    return f"<h2>{_text(title)}</h2>\n{content or '<p>none</p>'}"


def _picture(path: Path, text: str) -> str:
    """An image file within the page itself."""
    if not path.is_file():
        return ""
    data = base64.b64encode(path.read_bytes()).decode()
    return (
        f'<figure><img alt="{_text(text)}" src="data:image/png;base64,{data}">'
        f"<figcaption>{_text(text)}</figcaption></figure>"
    )


def _text(text: str) -> str:
    return html.escape(text, quote=True)
