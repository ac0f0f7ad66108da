"""The two orders in which programs number class folders.

torchvision sorts their names as text: 1, 10, 11, 2. timm sorts naturally, by the numbers in them
and ignoring case: 1, 2, 10, 11.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

ClassOrder = Literal["text", "natural"]


def natural_key(name: str) -> tuple[list[int | str], str]:
    """Return timm's sort key of a name; its text breaks ties (1 and 01).

    Source: ``timm.utils.misc.natural_key``.
    """
    parts = re.split(r"(\d+)", name.lower())
    return [int(part) if place % 2 else part for place, part in enumerate(parts)], name


KEYS: dict[ClassOrder, Callable[[str], Any] | None] = {"text": None, "natural": natural_key}


def sort_classes(names: Iterable[str], order: ClassOrder | None) -> list[str]:
    """Return the names in an order; None sorts as text."""
    return sorted(names, key=KEYS[order or "text"])


def other_orders(names: Sequence[str], order: ClassOrder | None) -> dict[str, tuple[str, ...]]:
    """Return the names in each order that would number them differently.

    Args:
        names: Names of the classes, in label order.
        order: Order of ``names``; None if the files number the classes themselves.
    """
    if order is None:
        return {}
    orders = {name: tuple(sort_classes(names, name)) for name in KEYS if name != order}
    return {name: names_of for name, names_of in orders.items() if names_of != tuple(names)}
