"""Keep tensors that evaluation computes from a few weights alone."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

MAX_ENTRIES = 9  # matrices of one map: of full windows, and of up to eight kinds at its edges


class EvalCache:
    """Tensors that are kept for as long as the weights they were made from have the same values.

    The values themselves are compared, so every way to change a weight invalidates: optimiser
    steps, ``load_state_dict``, ``.to()``, assignment, and edits of ``.data``, which leave no trace
    in torch's version counters. For weights much smaller than what is made from them this costs
    hardly any time. Copies and pickles are empty. Several threads may ask at the same time.
    """

    def __init__(self) -> None:
        self._entries: dict[Hashable, tuple[list[Tensor], Tensor]] = {}

    def get(
        self, sources: Sequence[Tensor], question: Hashable, compute: Callable[[], Tensor]
    ) -> Tensor:
        """Return what ``compute`` returns, kept for these sources unless gradients are recorded.

        Args:
            sources: All tensors that ``compute`` reads; small ones.
            question: Key of everything else that the answer depends on, such as a map size.
            compute: Makes the answer; its result must not be changed in place.
        """
        if torch.is_grad_enabled():
            self._entries = {}
            return compute()
        entry = self._entries.get(question)
        if entry is None or not _are_equal(entry[0], sources):
            entry = [s.detach().clone() for s in sources], compute()
            latest = list(self._entries.items())[1 - MAX_ENTRIES :]
            # Another dict instead of a change, as other threads may be reading this one.
            self._entries = {**dict(latest), question: entry}
        return entry[1]

    def __deepcopy__(self, memo: dict[int, Any]) -> EvalCache:
        return EvalCache()

    def __reduce__(self) -> tuple[type[EvalCache], tuple[()]]:
        return EvalCache, ()


def _are_equal(copies: Sequence[Tensor], now: Sequence[Tensor]) -> bool:
    return all(
        a.dtype == b.dtype and a.device == b.device and a.shape == b.shape and torch.equal(a, b)
        for a, b in zip(copies, now, strict=True)
    )
