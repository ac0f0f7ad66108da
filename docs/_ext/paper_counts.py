"""Counts of papers' rows and their verdicts, for the published rows and README's table."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import yaml

from tools.papers.published import PUBLISHED, Row, list_papers, load_rows


@functools.cache
def rows(paper: str) -> tuple[Row, ...]:
    """Return the rows of a paper by table."""
    return tuple(sorted(load_rows(paper), key=lambda row: row.table))


def title(paper: str) -> str:
    """Return authors, title, venue and year."""
    return str(yaml.safe_load((PUBLISHED / f"{paper}.yaml").read_text(encoding="utf-8"))["paper"])


def verdict(row: Row) -> str:
    """Return the verdict on a row's counts; empty without a printed count."""
    plain = next((one for one in rows(row.paper) if _is_base(one, row)), None)
    base = (plain.params, plain.exact_macs) if plain else None
    found = row.residuals(row.params, row.exact_macs, base)
    return row.verdict(found) if found else ""


def _is_base(one: Row, row: Row) -> bool:
    same = one.task == row.task and one.head == row.head and one.image_size == row.image_size
    return same and one.backbone == row.base and not one.options


def of_mixer(name: str, matches: Sequence[str]) -> list[Row]:
    """Return the rows that name a token mixer, and those of backbones that have it."""
    found = []
    for row in (row for paper in list_papers() for row in rows(paper)):
        named = dict(row.options.get("token_mixer") or {}).get("name")
        if named == name or (named is None and row.backbone in matches):
            found.append(row)
    return found


def of_backbone(matches: Sequence[str]) -> list[Row]:
    """Return the rows of these backbones, of all papers."""
    return [row for paper in list_papers() for row in rows(paper) if row.backbone in matches]
