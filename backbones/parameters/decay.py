"""Weight decay: vectors are exempt from it unless their module declares otherwise."""

from __future__ import annotations

from torch import nn


def decayed_vectors(model: nn.Module) -> frozenset[str]:
    """Return the names of vectors and scalars that get weight decay.

    A module lists its own in an attribute ``decayed_vectors``, such as ``("alpha", "beta")``, where
    its authors keep them as arrays with more axes, which timm's rule decays.
    """
    return frozenset(
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in getattr(module, "decayed_vectors", ())
    )
