"""Replacement of a module in a built network, the only way in which one takes another's place."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

M = TypeVar("M", bound=nn.Module)


def replace(parent: nn.Module, name: str, replacement: nn.Module) -> None:
    """Put a module in the place of one below ``parent``; the order of state-dict keys stays.

    Args:
        parent: Contains the module to replace.
        name: Its name below ``parent``, such as ``blocks.0.mlp``.
        replacement: Takes its place.

    Raises:
        AttributeError: ``parent`` lacks a module of this name.
    """
    path, _, child = name.rpartition(".")
    holder = parent.get_submodule(path)
    holder.get_submodule(child)
    setattr(holder, child, replacement)


def share_state(module: nn.Module, kind: type[M]) -> M:
    """Return a new object of another class with the state of a module.

    Both objects have one ``__dict__``: parameters, buffers, parts, hooks and options are shared.

    Args:
        module: Keeps its class.
        kind: Class of the new object; its constructor is not called.
    """
    twin = kind.__new__(kind)
    object.__setattr__(twin, "__dict__", module.__dict__)
    return twin
