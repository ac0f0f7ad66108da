"""Base of tasks with classes, and the check of a checkpoint's classes against the data's."""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from lightning.pytorch.utilities import rank_zero_warn
from timm.data import ImageNetInfo
from torch import nn

from backbones.checkpoints.opening import Checkpoint, open_checkpoint
from tasks.engine.base import BaseTask

SYNSET = re.compile(r"n\d{8}")  # WordNet's numbers of nouns: the names of ImageNet's folders
LISTED = 20  # number of classes listed completely
SHOWN = 5  # differences shown of longer lists
ORDER = "data.class_order"  # chooses the order in which class folders become labels
Orders = Mapping[str, tuple[str, ...]]  # the names of classes by order


@dataclass(frozen=True)
class Classes:
    """Classes of a network's outputs.

    Attributes:
        names: Names, in label order.
        category_ids: Label ids in the files of their data set; see ``BaseDataModule``.
    """

    names: tuple[str, ...]
    category_ids: tuple[int, ...] = ()


class ClassesTask(BaseTask):
    """Task with classes as targets; its checkpoints name them and must fit those of the data.

    Args:
        model: See ``BaseTask``.
        class_names: Names of the classes, in label order.
        **options: Options of ``BaseTask``.

    Attributes:
        category_ids: Id of each label in the data's files, if different; saved in checkpoints.
        other_orders: The classes in each other order that their data can be read in.
    """

    def __init__(self, model: nn.Module, class_names: Sequence[str], **options: Any) -> None:
        super().__init__(model, **options)
        self.class_names = tuple(class_names)
        self.category_ids: tuple[int, ...] = ()
        self.other_orders: Orders = {}

    def take_targets(self, datamodule: Any) -> None:
        """Copy the category ids and other orders of the data."""
        self.category_ids = datamodule.category_ids
        self.other_orders = datamodule.other_orders

    def target_arguments(self) -> dict[str, Any]:
        """Return names and category ids."""
        return {"class_names": self.class_names, "category_ids": self.category_ids}

    def target_state(self) -> dict[str, Any]:
        """Return names and category ids as plain lists for a checkpoint."""
        return {"class_names": list(self.class_names), "category_ids": list(self.category_ids)}

    @classmethod
    def targets_of(cls, checkpoint: Checkpoint) -> dict[str, Any] | None:
        """Return a checkpoint's names and category ids; None if it lacks them, like timm's."""
        classes = classes_of(checkpoint)
        if classes is None:
            return None
        return {"class_names": classes.names, "category_ids": classes.category_ids}

    def check_targets(self, checkpoint: Checkpoint) -> None:
        """Refuse a checkpoint that was trained on other classes, or in another order."""
        check_classes(checkpoint.values, self.class_names, checkpoint.path, self.other_orders)

    def load_weights(self, checkpoint: Checkpoint | str | Path, *, converted: bool = False) -> None:
        """Load as ``BaseTask`` does; warn if the classifier may use another order of classes."""
        opened = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
        super().load_weights(opened, converted=converted)
        if opened.class_names is None:
            warn_of_order(opened.path, self.class_names, self.other_orders)

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls, checkpoint_path: str | Path, map_location: Any = "cpu", **options: Any
    ) -> Self:
        """Build a task from a checkpoint, with the file's ``class_names`` unless given."""
        if "model" in options and "class_names" not in options:
            options["class_names"] = open_checkpoint(checkpoint_path, values_only=True).class_names
        return super().load_from_checkpoint(checkpoint_path, map_location, **options)


def readable(name: str) -> str:
    """Return the everyday name of a class; for a synset of ImageNet its first word.

    Source: WordNet's lemmas, from timm.
    """
    if not SYNSET.fullmatch(name):
        return name
    return _lemmas().get(name, name).partition(",")[0]


@functools.cache
def _lemmas() -> dict[str, str]:
    info: Any = ImageNetInfo("imagenet-22k")
    return {name: info.label_name_to_description(name) for name in info.label_names()}


def classes_of(checkpoint: Checkpoint) -> Classes | None:
    """Return the classes that a checkpoint names; None for one of timm's or the authors'."""
    names = checkpoint.class_names
    if names is None:
        return None
    # NFC, as the data modules read the names of folders and lists.
    composed = tuple(unicodedata.normalize("NFC", name) for name in names)
    return Classes(composed, checkpoint.category_ids)


def check_several(names: Sequence[str], missing: str) -> None:
    """Refuse data with fewer than two classes.

    Args:
        names: Names of the classes.
        missing: Remedy in the message: what to add to the data.

    Raises:
        ValueError: There are fewer than two classes.
    """
    if len(names) < 2:
        raise ValueError(
            f"this task needs at least two classes, but the data have {len(names)} "
            f"({', '.join(names)}); add {missing}"
        )


def check_classes(
    checkpoint: Mapping[str, Any],
    names: Sequence[str],
    source: str | Path,
    other_orders: Orders | None = None,
    option: str = ORDER,
) -> None:
    """Refuse a checkpoint that was trained on other classes, or on these in another order.

    Args:
        checkpoint: Content of the file; without names it passes.
        names: Class names of the data.
        source: The file, for the message.
        other_orders: The data's classes in each other order that they can be read in.
        option: Name of the option that chooses the order.

    Raises:
        ValueError: Shows both lists, or the differences of long lists.
    """
    classes = classes_of(Checkpoint(str(source), checkpoint))
    if classes is None or classes.names == tuple(names):
        return
    trained, data = classes.names, tuple(names)
    if sorted(trained) == sorted(data):
        how = f"the same {len(data)} classes in another order"
    else:
        how = f"{len(trained)} classes, and the data have {len(data)} different ones"
    if max(len(trained), len(data)) <= LISTED:
        lists = f"checkpoint: {', '.join(trained)}; data: {', '.join(data)}"
    else:
        lists = _differences(trained, data)
    orders = [
        order for order, order_names in (other_orders or {}).items() if order_names == trained
    ]
    remedy = (
        f"pass {option}={orders[0]}"
        if orders
        else "pass data with the classes of the checkpoint, in its order"
    )
    raise ValueError(f"{source} was trained on {how} ({lists}); {remedy}")


def warn_of_order(
    source: str | Path, names: Sequence[str], other_orders: Orders, option: str = ORDER
) -> None:
    """Warn of a classifier without class names if timm would order the data's classes differently.

    Args:
        source: The classifier's file or name.
        names: Class names of the data.
        other_orders: The data's classes in each other order that they can be read in.
        option: Name of the option that chooses the order.
    """
    natural = other_orders.get("natural")
    if natural is None:
        return
    first = next(i for i, pair in enumerate(zip(names, natural, strict=True)) if len({*pair}) > 1)
    rank_zero_warn(
        f"{source} lacks class names, so their order is unknown: class {first} is "
        f"{names[first]!r} here (folders sorted as text) and {natural[first]!r} in timm (sorted "
        f"by number); pass {option}=natural for a classifier that timm trained",
        stacklevel=3,
    )


def _differences(trained: Sequence[str], data: Sequence[str]) -> str:
    count = max(len(trained), len(data))
    pairs = [
        [repr(names[i]) if i < len(names) else "none" for names in (trained, data)]
        for i in range(count)
    ]
    differ = [(i, *pair) for i, pair in enumerate(pairs) if pair[0] != pair[1]]
    examples = "; ".join(f"{i}: {before} there, {now} here" for i, before, now in differ[:SHOWN])
    more = "; ..." if len(differ) > SHOWN else ""
    return f"{len(differ)} of {count} labels differ, checkpoint against data: {examples}{more}"
