"""Weight decay: which parameters are exempt from it.

Vectors and scalars are (norms, biases, layer scales), and what a module's authors mark. A module,
mixer or host declares its own in two attributes, which hold names relative to it:

    no_weight_decay    parameters of several axes, or modules, that are exempt
    decayed_vectors    vectors that decay, since the authors keep them as arrays with more axes
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def without_decay(model: nn.Module, *, hosts_only: bool = False) -> frozenset[str]:
    """Return the names of the parameters that weight decay leaves alone.

    A parameter with several names, such as a tied output, is exempt under all of them.

    Args:
        model: A backbone, or a model around one.
        hosts_only: Read the marks of the backbone alone, as earlier releases did.
    """
    decayed = frozenset(_declared(model, "decayed_vectors"))
    host = getattr(model, "backbone", model) if hosts_only else None
    marks = tuple(_declared(model, "no_weight_decay", host))
    names = dict(model.named_parameters(remove_duplicate=False))
    inside = tuple(f"{mark}." for mark in marks)
    marked = {names[name] for name in names if name in marks or name.startswith(inside)}
    return frozenset(
        name
        for name, parameter in names.items()
        if (parameter.ndim <= 1 and name not in decayed) or parameter in marked
    )


def _declared(model: nn.Module, attribute: str, only: object = None) -> Iterator[str]:
    """Yield the names that a model's modules, or one of them, declare, relative to the model."""
    for prefix, module in model.named_modules():
        names = getattr(module, attribute, ()) if only in (None, module) else ()
        if not callable(names):  # timm's models have a method, which their host reads
            yield from (f"{prefix}.{name}" if prefix else name for name in names)
