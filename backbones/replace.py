"""Replacement of a module in a built network, the only way in which one takes another's place."""

from __future__ import annotations

from torch import nn


def replace(parent: nn.Module, name: str, new: nn.Module) -> None:
    """Put a module in the place of one below ``parent``; the order of state-dict keys stays.

    Args:
        parent: Contains the module to replace.
        name: Its name below ``parent``, such as ``blocks.0.mlp``.
        new: Takes its place.

    Raises:
        AttributeError: ``parent`` has no module of this name.
    """
    path, _, child = name.rpartition(".")
    holder = parent.get_submodule(path)
    holder.get_submodule(child)
    setattr(holder, child, new)
