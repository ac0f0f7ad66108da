"""Where a mixer finds its compiled form; in a file that stands alone there is none."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn


class FusedForm(Protocol):
    """What the module of a compiled form has."""

    def serves(self, mixer: Any, x: Tensor) -> bool:
        """Whether it computes just what this mixer is, on such a map."""

    def mix(self, mixer: Any, x: Tensor, prefix: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
        """What the mixer makes of a map (B, H, W, C) and, when given, prefix tokens (B, P, C)."""


# By the class of mixers; a mixer's package enters its own.
FUSED_FORMS: dict[type[nn.Module], FusedForm] = {}
