"""Weights of a head by class: where they lie in its tensors, and which other classes get them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class ClassAxis:
    """Axis of a tensor along which the weights of classes lie.

    Attributes:
        axis: Number of the axis.
        step: Entries per class: 4 for a box per class, or the number of anchors per place.
        rest: Entries of no class, such as the background's or those of other features.
        by_class: True if all entries of a class are adjacent, False if each anchor has all classes.
    """

    axis: int
    step: int
    rest: int
    by_class: bool

    def length(self, num_classes: int) -> int:
        """Return the length of the axis."""
        return self.step * num_classes + self.rest

    def entries(self, num_classes: int) -> tuple[Tensor, Tensor]:
        """Return the positions of the classes, (K, step), and of the rest, (rest,)."""
        places = torch.arange(self.length(num_classes))
        if self.axis > 0 and self.rest:  # heads append predictions per class to other features
            return places[self.rest :].view(self.step, num_classes).T, places[: self.rest]
        width = num_classes + self.rest // self.step  # the background is last
        table = places.view(width, self.step) if self.by_class else places.view(self.step, width).T
        return table[:num_classes], table[num_classes:].flatten()


@dataclass(frozen=True)
class ClassChanges:
    """Classes of a new run beside those of the run that it starts from.

    Attributes:
        common: Classes of both, whose weights are loaded.
        additions: Classes of the new run alone, whose weights are initialised.
        dropped: Classes of the earlier run alone.
    """

    common: tuple[str, ...]
    additions: tuple[str, ...]
    dropped: tuple[str, ...]

    def __str__(self) -> str:
        """Return one line for a log."""
        parts = ("loaded", self.common), ("initialised", self.additions), ("left out", self.dropped)
        return "; ".join(f"{verb} {_enumerate(names)}" for verb, names in parts if names)


def compare_classes(before: Sequence[str], now: Sequence[str]) -> ClassChanges:
    """Compare the classes of two runs by name."""
    common, additions = (
        tuple(name for name in now if (name in before) == is_common) for is_common in (True, False)
    )
    return ClassChanges(common, additions, tuple(name for name in before if name not in now))


Axes = Mapping[str, Sequence[ClassAxis]]


def find_class_axes(
    model: nn.Module, wider: nn.Module, num_classes: int
) -> dict[str, list[ClassAxis]]:
    """Return the tensors of a model that have entries per class.

    Args:
        model: The model.
        wider: The same model with one class more, which may lie on the meta device.
        num_classes: Number of classes of ``model``.

    Raises:
        ValueError: The head orders its classes in an unknown way.
    """
    longer = {name: value.shape for name, value in wider.state_dict().items()}
    axes = {}
    for name, value in model.state_dict().items():
        # Linear layers have all numbers of a class together, convolutions all classes of an anchor.
        by_class = isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Linear)
        parts = [
            ClassAxis(axis, more - length, length - (more - length) * num_classes, by_class)
            for axis, (length, more) in enumerate(zip(value.shape, longer[name], strict=True))
            if more != length
        ]
        if any(part.rest < 0 or (part.axis == 0 and part.rest % part.step) for part in parts):
            raise ValueError(
                f"classes cannot be matched by name: {name} has {tuple(value.shape)} values for "
                f"{num_classes} classes; leave keep_head out to start from the backbone alone"
            )
        if parts:
            axes[name] = parts
    return axes


def with_classes(
    saved: Mapping[str, Tensor],
    model: nn.Module,
    axes: Axes,
    before: Sequence[str],
    now: Sequence[str],
) -> dict[str, Tensor]:
    """Return the tensors of a saved model for a model of other classes.

    Classes are matched by name; a new class keeps the values of the model.

    Args:
        saved: Tensors of the saved model, by the names of the model.
        model: The model.
        axes: From ``find_class_axes``.
        before: Classes of the saved model, in label order.
        now: Classes of the model, in label order.
    """
    tensors, state = dict(saved), model.state_dict()
    pairs = [(before.index(name), label) for label, name in enumerate(now) if name in before]
    sources, targets = ([pair[side] for pair in pairs] for side in (0, 1))
    for name, parts in axes.items():
        value, result = saved.get(name), state[name].detach().cpu().clone()
        if value is None or any(value.shape[p.axis] != p.length(len(before)) for p in parts):
            continue  # another model, which loading refuses
        goals = [torch.arange(length) for length in result.shape]
        for part in parts:
            (origins, rest_before), (places, rest_now) = (
                part.entries(len(names)) for names in (before, now)
            )
            value = value.index_select(
                part.axis, torch.cat([origins[sources].flatten(), rest_before])
            )
            goals[part.axis] = torch.cat([places[targets].flatten(), rest_now])
        if value.shape == tuple(map(len, goals)):
            result[torch.meshgrid(*goals, indexing="ij")] = value.to(result.dtype)
            tensors[name] = result
    return tensors


def _enumerate(names: Sequence[str], most: int = 20) -> str:
    text = ", ".join(names[:most])
    return text if len(names) <= most else f"{text} and {len(names) - most} more"
