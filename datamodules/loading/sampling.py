"""Order and random numbers of the samples, as functions of (seed, epoch, index)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

Key = tuple[int, int]  # (epoch, index)


class SizedDataset(Protocol):
    """Map-style dataset with a length."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class EpochSampler(Sampler[Key]):
    """Sampler of (epoch, index) for one rank's share of a permutation seeded by (seed, epoch).

    All ranks get equally many samples. The uneven tail is dropped; with fewer samples than ranks
    the permutation wraps around.

    With ``repeats`` each sample comes several times in a row, spread over the ranks, with a new
    augmentation each time. The epoch keeps its number of samples. The key's first number then
    counts repetitions instead of epochs.

    Source: DeiT's form of repeated augmentation (Hoffer et al., "Augment your batch", CVPR 2020).

    Args:
        length: Samples in the dataset.
        seed: Seed of all permutations.
        repeats: Repetitions of each sample.
        fixed: Use the first epoch's order in all epochs.
        rank: Rank of this process.
        world_size: Number of processes.
    """

    def __init__(
        self,
        length: int,
        seed: int = 0,
        *,
        repeats: int = 1,
        is_fixed: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.length, self.seed, self.repeats, self.fixed = length, seed, repeats, is_fixed
        self.rank, self.world_size = rank, world_size
        self.epoch = 0
        self._offset = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the permutation; Lightning calls this before each epoch."""
        self.epoch = epoch

    def set_offset(self, num_samples: int) -> None:
        """Skip the samples that this rank has already seen, in the next iteration only."""
        self._offset = num_samples

    def __len__(self) -> int:
        return max(self.length // self.world_size, 1)

    def __iter__(self) -> Iterator[Key]:
        """Iterate over this rank's (epoch, index) pairs."""
        offset, self._offset = self._offset, 0
        key = [self.seed, 0 if self.fixed else self.epoch]
        order = np.random.default_rng(key).permutation(self.length)
        total = len(self) * self.world_size
        places = range(self.rank, total, self.world_size)[offset:]
        first, repeats = self.epoch * self.repeats, self.repeats
        return (
            (first + place % repeats, int(order[place // repeats % self.length]))
            for place in places
        )


class EvalSampler(Sampler[Key]):
    """Sampler of (0, index) for every ``world_size``-th sample, without padding.

    A rank beyond the number of samples gets the first one, to stay in step with the others. Tasks
    exclude it; see ``Evaluation.is_spare``.
    """

    def __init__(self, length: int, *, rank: int = 0, world_size: int = 1) -> None:
        self.indices = range(rank, length, world_size) or range(min(length, 1))

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[Key]:
        """Iterate over this rank's (0, index) pairs."""
        return ((0, index) for index in self.indices)


class NamedDataset(Dataset[Any]):
    """Dataset that names the file of a sample in its errors.

    Errors that lack the file are re-raised as ``ValueError`` with it.

    Args:
        dataset: The dataset to wrap.
        describe: Returns the file of a sample, for error messages.

    Attributes:
        is_resident: True if a list of keys gives a whole batch; see ``resident``.
    """

    is_resident = False

    def __init__(self, dataset: SizedDataset, describe: Callable[[int], str]) -> None:
        self.dataset, self.describe = dataset, describe

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: Key) -> Any:
        """Return the sample of an (epoch, index) pair."""
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: Sequence[Key]) -> list[Any]:
        """Return the samples of a batch of pairs; torch's loaders call this once per batch."""
        return [self._sample(index) for _, index in keys]

    def _sample(self, index: int) -> Any:
        try:
            return self.dataset[index]
        except Exception as error:  # readers raise all kinds; each must name its file
            name = self.describe(index)
            if isinstance(error, ValueError | FileNotFoundError) and name in str(error):
                raise
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"sample {index} ({name}) cannot be loaded: {reason}") from error


class Unreadable(NamedTuple):
    """Stand-in for the sample of an image that cannot be read.

    Attributes:
        name: File of the image.
        reason: Message of the error.
    """

    name: str
    reason: str


class TolerantDataset(NamedDataset):
    """Dataset with ``Unreadable`` in place of broken files, so that the others are predicted."""

    def _sample(self, index: int) -> Any:
        try:
            return super()._sample(index)
        except (FileNotFoundError, ValueError) as error:
            return Unreadable(self.describe(index), str(error))


def collate_readable(collate: Callable[[list[Any]], Any], samples: list[Any]) -> dict[str, Any]:
    """Return the batch of the readable samples, with the others as its entry ``unreadable``.

    If all samples are unreadable, the batch has that entry alone.
    """
    broken = [sample for sample in samples if isinstance(sample, Unreadable)]
    readable = [sample for sample in samples if not isinstance(sample, Unreadable)]
    batch: dict[str, Any] = collate(readable) if readable else {}
    return batch | {"unreadable": broken} if broken else batch


class SeededDataset(NamedDataset):
    """Dataset with samples that depend on (seed, epoch, index) alone, for any number of workers.

    Augmentations draw from the global generators of Python, numpy and torch. These are seeded per
    sample and restored after a batch.

    Args:
        dataset: The dataset to wrap.
        seed: Seed of the run.
        describe: Returns the file of a sample, for error messages.
    """

    def __init__(self, dataset: SizedDataset, seed: int, describe: Callable[[int], str]) -> None:
        super().__init__(dataset, describe)
        self.seed = seed

    def __getitems__(self, keys: Sequence[Key]) -> list[Any]:
        """Return the samples of a batch of pairs; torch's loaders call this once per batch."""
        # All at once, while numpy's code for it is still in the processor's cache.
        seeds = [generator_seeds(self.seed, epoch, index) for epoch, index in keys]
        with restored_generators():
            return [
                self._seeded(key[1], seeds_of_key)
                for key, seeds_of_key in zip(keys, seeds, strict=True)
            ]

    def _seeded(self, index: int, seeds: Sequence[int]) -> Any:
        seed_generators(seeds)
        return self._sample(index)


def generator_seeds(*key: int) -> list[int]:
    """Return one seed per generator, derived from the key."""
    seeds: list[int] = np.random.SeedSequence(key).generate_state(3).tolist()
    return seeds


def seed_generators(seeds: Sequence[int]) -> None:
    """Seed the global generators of Python, numpy and torch (CPU)."""
    random.seed(seeds[0])
    np.random.seed(seeds[1])
    # torch.manual_seed would also reseed the GPUs.
    torch.default_generator.manual_seed(seeds[2])


@contextmanager
def restored_generators() -> Iterator[None]:
    """Restore the global generators of Python, numpy and torch (CPU) on exit."""
    python_state, numpy_state, torch_state = (
        random.getstate(),
        np.random.get_state(),
        torch.get_rng_state(),
    )
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)


def process_group() -> tuple[int, int]:
    """Return (rank, world size) of this process; (0, 1) outside a process group."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1
