"""Names of a paper's rows: paper, table, backbone, and what distinguishes similar rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tools.papers.published import Row

# Papers count the fused form, which is never trained; the image size belongs to the data.
UNTRAINED = ("fused", "img_size")
# The name of a token mixer follows from its options.
UNNAMED = (*UNTRAINED, "name")
Part = tuple[str, str]  # kind and key


def row_names(rows: Sequence[Row]) -> list[str]:
    """Return a name for each row of a paper: ``<paper>_t<table>_<backbone>`` and suffixes.

    Suffixes distinguish the rows of a backbone within a table: head, data, options, image size and
    protocol, in this order. An option is the last part of its key and its value, or the row's
    ``variant``. The image size is only added if it is larger than that of the table's first row.
    Rows without a metric get an empty name.
    """
    groups: dict[tuple[int, str], list[dict[Part, Any]]] = {}
    usual: dict[int, int] = {}
    for row in rows:
        if row.metrics:
            groups.setdefault((row.table, row.backbone), []).append(_distinguishing_parts(row))
            usual.setdefault(row.table, row.image_size)
    names = []
    for row in rows:
        if not row.metrics:
            names.append("")
            continue
        group, parts = groups[row.table, row.backbone], _distinguishing_parts(row)
        differing = {
            key: value
            for key, value in parts.items()
            if any(sibling.get(key) != value for sibling in group)
        }
        words = [_name_part(key, value) for key, value in differing.items() if key[0] == "head"]
        words += [_name_part(key, value) for key, value in differing.items() if key[0] == "option"]
        words += [str(row.image_size)] * (row.image_size > usual[row.table])
        words += [
            _name_part(key, value) for key, value in differing.items() if key[0] == "protocol"
        ]
        names.append("_".join([f"{row.paper}_t{row.table}", row.backbone, *words]))
    return names


def _distinguishing_parts(row: Row) -> dict[Part, Any]:
    """Return what may distinguish a row from others of its backbone and table, by kind and key."""
    options = {"": row.variant} if row.variant else _flatten_leaves(row.options)
    parts = {("head", "head"): row.head, ("head", "data"): row.train.data}
    return {
        **{part: value for part, value in parts.items() if value},
        **{("option", key): value for key, value in options.items()},
        **({("protocol", ""): row.train.protocol} if row.train.protocol else {}),
    }


def _flatten_leaves(options: Mapping[str, Any]) -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in options.items():
        if isinstance(value, Mapping):
            leaves |= _flatten_leaves(value)
        elif key not in UNNAMED:
            leaves[key] = value
    return leaves


def _name_part(part: Part, value: Any) -> str:
    values = value if isinstance(value, list) else [value]
    text = "_".join(str(item).lower() if isinstance(item, bool) else str(item) for item in values)
    kind, key = part
    return f"{key}_{text}" if kind == "option" and key else text
