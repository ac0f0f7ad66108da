"""The classes that a checkpoint knows, and whether they are those of the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backbones.checkpoints.opening import Checkpoint

LISTED = 20  # classes that are listed whole
SHOWN = 5  # differences shown of longer lists


@dataclass(frozen=True)
class Classes:
    """What a network's outputs stand for.

    Attributes:
        names: Names, in label order.
        category_ids: What the files of their data set call each label; see ``BaseDataModule``.
    """

    names: tuple[str, ...]
    category_ids: tuple[int, ...] = ()


def classes_of(checkpoint: Checkpoint) -> Classes | None:
    """The classes that a checkpoint names; None for one of timm's or the authors'."""
    names = checkpoint.class_names
    return None if names is None else Classes(names, checkpoint.category_ids)


def check_several(names: Sequence[str], missing: str) -> None:
    """Refuse to tell apart a single class.

    Args:
        names: Of the classes.
        missing: What the data lack, for the message.

    Raises:
        ValueError: There is one class, or none.
    """
    if len(names) < 2:
        raise ValueError(
            f"this task tells at least two classes apart, and the data have {len(names)} "
            f"({', '.join(names)}); add {missing}"
        )


def check_classes(checkpoint: Mapping[str, Any], names: Sequence[str], source: str | Path) -> None:
    """Refuse a checkpoint that was trained on other classes, or on these in another order.

    Args:
        checkpoint: What the file holds; without names, nothing is compared.
        names: Of the data.
        source: The file, for the message.

    Raises:
        ValueError: Shows both lists, of long ones where they differ.
    """
    classes = classes_of(Checkpoint(str(source), checkpoint))
    if classes is None or classes.names == tuple(names):
        return
    trained, data = classes.names, tuple(names)
    if sorted(trained) == sorted(data):
        how = f"the same {len(data)} classes in another order"
    else:
        how = f"{len(trained)} classes, and the data have {len(data)}, not the same ones"
    if max(len(trained), len(data)) <= LISTED:
        lists = f"checkpoint: {', '.join(trained)}; data: {', '.join(data)}"
    else:
        lists = _differences(trained, data)
    raise ValueError(
        f"{source} was trained on {how} ({lists}); pass data with the classes of the checkpoint, "
        "in its order"
    )


def _differences(trained: Sequence[str], data: Sequence[str]) -> str:
    count = max(len(trained), len(data))
    pairs = [
        [repr(names[i]) if i < len(names) else "none" for names in (trained, data)]
        for i in range(count)
    ]
    differ = [(i, *pair) for i, pair in enumerate(pairs) if pair[0] != pair[1]]
    shown = "; ".join(f"{i}: {one} there, {other} here" for i, one, other in differ[:SHOWN])
    more = "; ..." if len(differ) > SHOWN else ""
    return f"{len(differ)} of {count} labels differ, checkpoint against data: {shown}{more}"
