"""Find rows on equal terms: networks that differ only in their mixers."""

from __future__ import annotations

import json
import string
from collections.abc import Mapping, Sequence
from typing import Any

from tools.comparing.evaluations import UNKNOWN, is_evaluation
from tools.comparing.run_records import RunRecord
from tools.comparing.table import Row
from tools.runs.folder import may_differ

# Settings that name the mixers, and settings that change neither network nor training.
MIXERS = ("backbone.name", "backbone.mixer", "backbone.token_mixer")
OTHER = ("seed", "data.root", "mode", "task_name")
# Facts in summary.json's ``network``, and their names here.
FACTS = {
    "host": "host",
    "class_tokens": "class tokens",
    "pooling": "pooling",
    "norms": "norms",
    "host_parameters": "parameters outside of mixers",
}
COUNT = FACTS["host_parameters"]
MANY = 6  # maximum number of listed differences


def comparison_terms(run: RunRecord) -> dict[str, Any]:
    """Return all settings and facts of a run that a comparison of mixers must keep equal."""
    terms = {
        key: value
        for key, value in run.config.items()
        if value is not None
        and key not in OTHER
        and not may_differ(key)
        and not is_evaluation(key)
        and not any(f"{key}.".startswith(f"{mixer}.") for mixer in MIXERS)
    }
    if "backbone.pretrained" in terms:
        terms["backbone.pretrained"] = _start(terms["backbone.pretrained"])
    images = (run.summary.get("data") or {}).get("samples") or {}
    terms["training images"] = images.get("train", UNKNOWN)
    network = run.summary.get("network") or {}
    terms |= {"replaced": network["replaced"]} if "replaced" in network else {}
    return terms | {name: network.get(fact, UNKNOWN) for fact, name in FACTS.items()}


def _start(pretrained: Any) -> str:
    """Return the kind of start; the files of two networks always differ."""
    if isinstance(pretrained, str):
        return "trained weights"
    return "timm's weights" if pretrained else "random weights"


def mark_terms(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Give rows on equal terms the same letter; rows of older runs get none.

    Returns:
        The names of the rows by letter, for groups of two or more.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        terms = comparison_terms(row.first)
        if terms[COUNT] != UNKNOWN:
            groups.setdefault(json.dumps(terms, sort_keys=True, default=str), []).append(row)
    several = [group for group in groups.values() if len(group) > 1]
    letters = {}
    for number, group in enumerate(several):
        letter = string.ascii_lowercase[number] if number < 26 else f"a{number}"
        for row in group:
            row.terms = letter
        letters[letter] = [row.name for row in group]
    return letters


def describe_terms(rows: Sequence[Row], axis: str = "") -> list[str]:
    """Return lines for below a table or plot: rows on equal terms, and other differences.

    Args:
        rows: The rows.
        axis: Setting that a plot shows.
    """
    letters = mark_terms(rows)
    if len(rows) < 2:
        return []
    lines = []
    if letters:
        text = "; ".join(f"{letter}: {', '.join(names)}" for letter, names in letters.items())
        lines.append(f"on equal terms apart from the mixer: {text}")
    rest = [row.name for row in rows if comparison_terms(row.first)[COUNT] == UNKNOWN]
    if rest:
        lines.append(
            f"not known to be on equal terms: {', '.join(rest)} (summary.json lacks the network)"
        )
    differ = _differences(rows, axis)
    if differ:
        lines.append("besides the mixer these differ:")
        lines += [f"  {line}" for line in differ]
    return lines


def _differences(rows: Sequence[Row], axis: str) -> list[str]:
    """Return the differences between rows; settings that split the rows equally share a line."""
    terms = {row.name: comparison_terms(row.first) for row in rows}
    keys = [*FACTS.values(), *sorted({key for row in terms.values() for key in row})]
    hosts = len({row[FACTS["host"]] for row in terms.values()}) > 1
    partitions: dict[str, list[str]] = {}
    for key in dict.fromkeys(key for key in keys if key != axis):
        if hosts and key.startswith("backbone.") and any(key not in row for row in terms.values()):
            continue  # an option that one of the hosts lacks
        values = {name: _text(row.get(key)) for name, row in terms.items()}
        if len(set(values.values())) > 1:
            order = list(dict.fromkeys(values.values()))
            parts = json.dumps([order.index(value) for value in values.values()])
            partitions.setdefault(parts, []).append(key)
    if len(partitions) > 1 or any(len(keys) > 1 for keys in partitions.values()):
        for (
            shared
        ) in partitions.values():  # the count is only shown if nothing else explains the difference
            if COUNT in shared and (len(shared) > 1 or len(partitions) > 1):
                shared.remove(COUNT)
    lines = [_line(shared, terms) for shared in partitions.values() if shared]
    more = [f"and {len(lines) - MANY} more"] if len(lines) > MANY else []
    return [*lines[:MANY], *more]


def _line(keys: Sequence[str], terms: Mapping[str, Mapping[str, Any]]) -> str:
    """Format ``class tokens 1, pooling class token: deit_t; class tokens 0, ...: deit_t_iffn``."""
    groups: dict[str, list[str]] = {}
    for name, row in terms.items():
        words = [
            f"{key}={_text(row.get(key))}" if "." in key else f"{key} {_text(row.get(key))}"
            for key in keys[:MANY]
        ]
        words += [f"and {len(keys) - MANY} more"] if len(keys) > MANY else []
        groups.setdefault(", ".join(words), []).append(name)
    return "; ".join(f"{words}: {', '.join(names)}" for words, names in groups.items())


def _text(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return "null" if value is None else str(value).lower()
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
