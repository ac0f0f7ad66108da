"""Elements of a self-contained HTML page: text, tables, images, sections."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.engine.run_folder.atomic_writes import is_own_file
from tools.cli.tables import Columns, Record

STYLE = Path(__file__).with_name("page.css")
MOST_ROWS = 40  # per table; the analysis' own CSV has all rows
FOLDED = 15  # tables with this many rows are collapsed
PNG = b"\x89PNG\r\n\x1a\n"  # first bytes of a PNG
LONG = 60  # cells with this many characters are wrapped


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading; ``about`` is set in small type below it."""

    anchor: str
    title: str
    content: str
    about: str = ""


def document(title: str, head: str, sections: Sequence[Section]) -> str:
    """Return the page: head, table of contents and sections.

    Args:
        title: Title of the window.
        head: HTML.
        sections: In order.
    """
    items = "\n".join(
        f'<li><a href="#{text(part.anchor)}">{text(part.title)}</a></li>' for part in sections
    )
    parts = "\n".join(map(_section, sections))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(title)}</title>\n<style>\n{STYLE.read_text(encoding='utf-8')}</style></head>"
        f"\n<body>\n{head}\n<nav><ul>\n{items}\n</ul></nav>\n{parts}\n</body></html>\n"
    )


def table(records: Sequence[Record], columns: Columns, *, shows_all: bool = False) -> str:
    """Return a table that scrolls in narrow windows; long ones are collapsed.

    Args:
        records: Rows; those beyond ``MOST_ROWS`` are counted below the table instead.
        columns: Key -> heading and format of the values; None is shown as a dash.
        shows_all: Show all rows at once.
    """
    if not records:
        return ""
    headings = {key: columns[key] for key in records[0] if key in columns}
    marks = {key: _mark([record[key] for record in records]) for key in headings}
    heads = "".join(
        f"<th{marks[key]}>{text(heading)}</th>" for key, (heading, _) in headings.items()
    )
    lines = []
    most = len(records) if shows_all else MOST_ROWS
    for record in records[:most]:
        values = [(marks[key], record[key], form) for key, (_, form) in headings.items()]
        cells = [
            (mark, "-" if value is None else form.format(value)) for mark, value, form in values
        ]
        lines.append("<tr>" + "".join(_cell(mark, cell) for mark, cell in cells) + "</tr>")
    rows = "\n".join(lines)
    box = (
        f'<div class="wide"><table><thead><tr>{heads}</tr></thead>\n<tbody>{rows}</tbody></table>'
        "</div>"
    )
    more = len(records) - most
    if more > 0:
        box += f'<p class="what">{more} more {"row" if more == 1 else "rows"} left out</p>'
    if shows_all or len(records) < FOLDED:
        return box
    return f"<details><summary>Table of {len(records)} rows</summary>{box}</details>"


def pairs(rows: Mapping[str, str]) -> str:
    """Return a table of names and values."""
    lines = "\n".join(
        f"<tr><th>{text(name)}</th>{_cell('', value)}</tr>" for name, value in rows.items()
    )
    return f'<div class="wide"><table><tbody>{lines}</tbody></table></div>' if rows else ""


def tiles(values: Mapping[str, str]) -> str:
    """Return the main figures as tiles."""
    items = "".join(
        f'<div class="tile"><b>{text(value)}</b><span>{text(name)}</span></div>'
        for name, value in values.items()
    )
    return f'<div class="tiles">{items}</div>' if items else ""


def figures(parts: Iterable[str], *, halves: bool = False) -> str:
    """Return images and tables side by side where there is room.

    Args:
        parts: HTML.
        halves: Each is at most half as wide as a wide page.
    """
    together = "\n".join(part for part in parts if part)
    return f'<div class="figures{" halves" * halves}">{together}</div>' if together else ""


def picture(path: Path, words: str, caption: str = "") -> str:
    """Embed an image file in the page.

    Args:
        path: A PNG; other files, and links, give an empty text.
        words: Alternative text.
        caption: Below the image.
    """
    content = path.read_bytes() if is_own_file(path) else b""
    if not content.startswith(PNG):
        return ""
    data = base64.b64encode(content).decode()
    below = f"<figcaption>{text(caption)}</figcaption>" if caption else ""
    return f'<figure><img alt="{text(words)}" src="data:image/png;base64,{data}">{below}</figure>'


def text(words: str) -> str:
    """Escape a text for HTML."""
    return html.escape(words, quote=True)


def _section(section: Section) -> str:
    about = f'<p class="what">{section.about}</p>\n' if section.about else ""
    return f'<h2 id="{text(section.anchor)}">{text(section.title)}</h2>\n{about}{section.content}'


def _mark(values: Iterable[object]) -> str:
    """Return the attribute that aligns a column of numbers to the right."""
    entries = [value for value in values if value is not None]
    numbers = entries and all(isinstance(value, int | float) for value in entries)
    return ' class="number"' if numbers else ""


def _cell(mark: str, value: str) -> str:
    mark = mark or (' class="text"' if len(value) > LONG else "")
    return f"<td{mark}>{text(value)}</td>"
