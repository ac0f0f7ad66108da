"""Pages of measurements, from the json files in docs/measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from markup import table

FOLDER = Path(__file__).resolve().parents[1] / "measurements"
FIELDS = {"title", "machine", "date", "command", "versions", "notes", "columns", "rows"}


def read(folder: Path = FOLDER) -> dict[str, list[dict[str, Any]]]:
    """Read all measurements, by the folder of their machine."""
    found: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(folder.glob("*/*.json")):
        content = json.loads(file.read_text(encoding="utf-8"))
        if set(content) - {"picture"} != FIELDS:
            raise ValueError(f"{file} must have the fields {sorted(FIELDS)}, got {sorted(content)}")
        found.setdefault(file.parent.name, []).append(content)
    return found


def pages(folder: Path = FOLDER) -> dict[str, str]:
    """Return a page for each machine; the index is written by hand."""
    return {name: _page(name, entries) for name, entries in read(folder).items()}


def _page(folder: str, entries: list[dict[str, Any]]) -> str:
    parts = [f"# {entries[0]['machine']}"]
    for entry in entries:
        facts = [f"* Date: {entry['date'] or 'not recorded'}", f"* Command: `{entry['command']}`"]
        facts += [f"* {name}: {value}" for name, value in entry["versions"].items()]
        text = f"## {entry['title']}\n\n" + "\n".join(facts)
        picture = f"![{entry['title']}]({folder}/{entry['picture']})" if "picture" in entry else ""
        rows = table(entry["columns"], entry["rows"])
        parts += filter(None, [text, picture, rows, *entry["notes"]])
    return "\n\n".join(parts) + "\n"
