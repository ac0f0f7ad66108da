"""Which sample comes when, with which random numbers: a function of (seed, epoch, index)."""

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
    """A map-style dataset that knows its length."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class EpochSampler(Sampler[Key]):
    """Yields (epoch, index) of one rank's share of a permutation seeded by (seed, epoch).

    All ranks get equally many samples: the uneven tail is left out, or, where there are fewer
    samples than ranks, the permutation wraps around.

    With ``repeats`` each sample comes several times in a row, on as many ranks if there are, each
    time augmented anew, and the epoch ends when as many samples have come as there are: repeated
    augmentation (Hoffer et al., "Augment your batch", CVPR 2020), in DeiT's form. The number that
    comes instead of the epoch is then another one for each repetition.

    Args:
        length: Samples in the dataset.
        seed: Decides all permutations.
        repeats: How often each sample comes.
        fixed: Take the samples of each epoch in the order of the first one.
        rank: This process.
        world_size: Number of processes.
    """

    def __init__(
        self,
        length: int,
        seed: int = 0,
        *,
        repeats: int = 1,
        fixed: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.length, self.seed, self.repeats, self.fixed = length, seed, repeats, fixed
        self.rank, self.world_size = rank, world_size
        self.epoch = 0
        self._offset = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation; Lightning calls this before each epoch."""
        self.epoch = epoch

    def set_offset(self, num_samples: int) -> None:
        """Skip the samples that this rank has already seen, in the next iteration only."""
        self._offset = num_samples

    def __len__(self) -> int:
        """Samples of a whole epoch on this rank."""
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
    """Yields (0, index) for every ``world_size``-th sample: unpadded, so no sample counts twice.

    A rank beyond the number of samples gets the first one, which keeps it in step with the others.
    Tasks leave it out, see ``Evaluation.is_spare``.
    """

    def __init__(self, length: int, *, rank: int = 0, world_size: int = 1) -> None:
        self.indices = range(rank, length, world_size) or range(min(length, 1))

    def __len__(self) -> int:
        """Samples of this rank."""
        return len(self.indices)

    def __iter__(self) -> Iterator[Key]:
        """Iterate over this rank's (0, index) pairs."""
        return ((0, index) for index in self.indices)


class NamedDataset(Dataset[Any]):
    """Samples whose errors name their file; it leaves the generators of random numbers alone.

    Errors that do not name the file leave as ``ValueError`` that does.

    Args:
        dataset: The dataset to wrap.
        describe: Gives the file of a sample, for error messages.
    """

    def __init__(self, dataset: SizedDataset, describe: Callable[[int], str]) -> None:
        self.dataset, self.describe = dataset, describe

    def __len__(self) -> int:
        """Samples in the dataset."""
        return len(self.dataset)

    def __getitem__(self, key: Key) -> Any:
        """Get the sample of an (epoch, index) pair."""
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: Sequence[Key]) -> list[Any]:
        """Get the samples of a batch of pairs, which torch's loaders ask for at once."""
        return [self._sample(index) for _, index in keys]

    def _sample(self, index: int) -> Any:
        try:
            return self.dataset[index]
        except Exception as error:  # readers raise all kinds; each is told with its file
            name = self.describe(index)
            if isinstance(error, ValueError | FileNotFoundError) and name in str(error):
                raise
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"sample {index} ({name}) cannot be loaded: {reason}") from error


class Unreadable(NamedTuple):
    """An image that cannot be predicted, in place of its sample.

    Attributes:
        name: Its file.
        reason: The message of the error.
    """

    name: str
    reason: str


class TolerantDataset(NamedDataset):
    """Gives ``Unreadable`` for a broken file, so that others are predicted; see ``readable``."""

    def _sample(self, index: int) -> Any:
        try:
            return super()._sample(index)
        except (FileNotFoundError, ValueError) as error:
            return Unreadable(self.describe(index), str(error))


def readable(collate: Callable[[list[Any]], Any], samples: list[Any]) -> dict[str, Any]:
    """Return the batch of the readable samples, with the others as its entry ``unreadable``.

    A batch without readable samples has that entry alone.
    """
    broken = [sample for sample in samples if isinstance(sample, Unreadable)]
    kept = [sample for sample in samples if not isinstance(sample, Unreadable)]
    batch: dict[str, Any] = collate(kept) if kept else {}
    return batch | {"unreadable": broken} if broken else batch


class SeededDataset(NamedDataset):
    """Makes each sample depend on (seed, epoch, index) only, so on no worker and no earlier sample.

    Augmentations draw from the global generators of Python, numpy and torch; these are seeded for
    each sample and put back after a batch.

    Args:
        dataset: The dataset to wrap.
        seed: The run's seed.
        describe: Gives the file of a sample, for error messages.
    """

    def __init__(self, dataset: SizedDataset, seed: int, describe: Callable[[int], str]) -> None:
        super().__init__(dataset, describe)
        self.seed = seed

    def __getitems__(self, keys: Sequence[Key]) -> list[Any]:
        """Get the samples of a batch of pairs, which torch's loaders ask for at once."""
        # Together, before an image pushes the code that does it out of the processor's cache.
        seeds = [generator_seeds(self.seed, epoch, index) for epoch, index in keys]
        with generators_put_back():
            return [self._seeded(key[1], own) for key, own in zip(keys, seeds, strict=True)]

    def _seeded(self, index: int, seeds: Sequence[int]) -> Any:
        seed_generators(seeds)
        return self._sample(index)


def generator_seeds(*key: int) -> list[int]:
    """A seed of each generator, by the key."""
    seeds: list[int] = np.random.SeedSequence(key).generate_state(3).tolist()
    return seeds


def seed_generators(seeds: Sequence[int]) -> None:
    """Seed the generators of Python, numpy and torch (CPU)."""
    random.seed(seeds[0])
    np.random.seed(seeds[1])
    # torch.manual_seed would also reseed the GPUs.
    torch.default_generator.manual_seed(seeds[2])


@contextmanager
def generators_put_back() -> Iterator[None]:
    """Leave the generators of Python, numpy and torch (CPU) as they were."""
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
    """(rank, world size) of this process; (0, 1) outside a process group."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1
