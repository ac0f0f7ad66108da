"""Datasets that lie on one device and give whole batches, changed there by each sample's draws."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor

from datamodules.loading.memory import format_bytes, machine_memory
from datamodules.loading.sampling import Key, NamedDataset, process_group

Numbers = NDArray[np.float64]
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio: the step of SplitMix64


class Draws:
    """Uniform numbers for a batch; the row of a sample depends on (seed, epoch, index) alone.

    Source: SplitMix64 of Steele et al., "Fast splittable pseudorandom number generators",
    OOPSLA 2014, with a state that is mixed from the key.

    Args:
        seed: Seed of the run.
        keys: (epoch, index) of each sample.
    """

    def __init__(self, seed: int, keys: Sequence[Key]) -> None:
        self._state = _mixed(np.full(len(keys), seed % 2**64, np.uint64))
        for part in np.array(keys, np.uint64).T:
            self._state = _mixed((self._state ^ part) + GOLDEN)
        self._taken = 0

    def uniform(self, low: float = 0.0, high: float = 1.0, count: int = 1) -> Numbers:
        """Return the next numbers from low to below high, (B, count)."""
        steps = np.arange(self._taken + 1, self._taken + 1 + count, dtype=np.uint64)
        self._taken += count
        bits = _mixed(self._state[:, None] + steps * GOLDEN) >> np.uint64(11)
        shares: Numbers = low + (high - low) * (bits.astype(np.float64) * 2.0**-53)
        return shares

    def below(self, most: NDArray[np.int64] | int) -> NDArray[np.int64]:
        """Return the next integers from 0 to below these numbers, (B,)."""
        return np.floor(self.uniform()[:, 0] * most).astype(np.int64)

    def chance(self, probability: float) -> NDArray[np.bool_]:
        """Return True with a probability, (B,)."""
        happens: NDArray[np.bool_] = self.uniform()[:, 0] < probability
        return happens


def _mixed(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


Change = Callable[[dict[str, Any], Draws], dict[str, Any]]


class ResidentDataset(NamedDataset):
    """Dataset of tensors on one device; a list of keys gives a whole batch.

    Args:
        source: The dataset that the tensors were read from.
        entries: Each entry of the samples, for all samples in order.
        seed: Seed of the run.
        change: Changes a batch by draws, as in training; None leaves it as it is.
    """

    is_resident = True

    def __init__(
        self,
        source: NamedDataset,
        entries: Mapping[str, Tensor],
        seed: int,
        change: Change | None = None,
    ) -> None:
        super().__init__(source.dataset, source.describe)
        self.entries, self.seed, self.change = dict(entries), seed, change

    def __getitems__(self, keys: Sequence[Key]) -> dict[str, Any]:  # type: ignore[override]
        """Return the batch of (epoch, index) pairs."""
        device = next(iter(self.entries.values())).device
        rows = torch.tensor([index for _, index in keys]).to(device)
        batch = {name: values[rows] for name, values in self.entries.items()}
        return batch if self.change is None else self.change(batch, Draws(self.seed, keys))


def read_entries(
    batches: Iterable[Mapping[str, Tensor]], count: int, device: torch.device
) -> dict[str, Tensor]:
    """Return the entries of all batches as one tensor each, on a device.

    Args:
        batches: The batches, in order.
        count: Samples of all batches.
        device: Device of the tensors.
    """
    entries: dict[str, Tensor] = {}
    start = 0
    for batch in batches:
        for name, values in batch.items():
            if name not in entries:
                entries[name] = values.new_empty((count, *values.shape[1:]), device=device)
            entries[name][start : start + len(values)] = values
        start += len(values)
    return entries


def check_room(size: int, device: torch.device) -> None:
    """Raise an error if images exceed the memory that is free on a device.

    Args:
        size: Bytes per process; processes share the memory of a CPU.
        device: The device.

    Raises:
        ValueError: They exceed it.
    """
    if device.type == "cuda":
        available = torch.cuda.mem_get_info(device)[0]
    else:
        available = min(psutil.virtual_memory().available, machine_memory())
        size *= process_group()[1]
    if size > available:
        raise ValueError(
            f"data.resident=true keeps {format_bytes(size)} of images on {device}, which has "
            f"{format_bytes(available)} free; lower data.image_size, or leave data.resident out"
        )
