"""The two orders in which programs number class folders.

torchvision sorts their names as text: 1, 10, 11, 2. timm sorts by the numbers in them: 1, 2, 10,
11; letters count without their case.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal, get_args

ClassOrder = Literal["text", "natural"]


def natural_key(name: str) -> tuple[list[int | str], str]:
    """Return what timm sorts a name by; its text decides between equal ones (1 and 01).

    Source: ``timm.utils.misc.natural_key``.
    """
    parts = re.split(r"(\d+)", name.lower())
    return [int(part) if place % 2 else part for place, part in enumerate(parts)], name


def in_order(names: Iterable[str], order: ClassOrder | None) -> list[str]:
    """Return the names in an order, as text without one."""
    return sorted(names, key=natural_key) if order == "natural" else sorted(names)


def other_orders(names: Sequence[str], order: ClassOrder | None) -> dict[str, tuple[str, ...]]:
    """Return the names in each order that would number them differently.

    Args:
        names: Of the classes, in label order.
        order: They were read in; None if the files number the classes themselves.
    """
    if order is None:
        return {}
    others = {one: tuple(in_order(names, one)) for one in get_args(ClassOrder) if one != order}
    return {one: found for one, found in others.items() if found != tuple(names)}


def checked_order(order: str) -> ClassOrder:
    """Return the order.

    Raises:
        ValueError: There is no such order.
    """
    if order not in get_args(ClassOrder):
        raise ValueError(
            f"data.class_order={order} is not one of {', '.join(get_args(ClassOrder))}"
        )
    return order  # type: ignore[return-value]
