"""Sine waves made in memory, and signals in .npy files to predict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from datamodules.base import BaseDataModule, Split, check_minimum
from datamodules.loading.sampling import NamedDataset, SeededDataset, TolerantDataset


class Waves:
    """Sine waves of a random frequency, which is their number.

    Args:
        count: Number of waves.
        length: L.
        seed: Decides frequencies and phases.
    """

    def __init__(self, count: int, length: int, seed: int) -> None:
        generator = np.random.default_rng(seed)
        self.numbers = generator.uniform(1, 4, count).astype(np.float32)
        self.phases = generator.uniform(0, 1, count)
        self.times = np.linspace(0, 1, length)

    def __len__(self) -> int:
        """Return the number of waves."""
        return len(self.numbers)

    def __getitem__(self, index: int, /) -> dict[str, Tensor]:
        """Return ``signal`` (1, L), ``number`` and ``sample_id``."""
        turns = self.numbers[index] * self.times + self.phases[index]
        return sample(np.sin(2 * np.pi * turns), float(self.numbers[index]), index)


class Files:
    """Signals in .npy files, whose numbers are unknown."""

    def __init__(self, path: Path) -> None:
        self.files = sorted(path.glob("*.npy")) if path.is_dir() else [path]

    def __len__(self) -> int:
        """Return the number of files."""
        return len(self.files)

    def __getitem__(self, index: int, /) -> dict[str, Tensor]:
        """Return ``signal`` (1, L), a ``number`` that is NaN, and ``sample_id``."""
        return sample(np.load(self.files[index]), float("nan"), index)

    def name(self, index: int) -> str:
        """Return the file of a signal."""
        return str(self.files[index])


class WavesDataModule(BaseDataModule):
    """Sine waves and their frequencies.

    Args:
        root: Not used.
        length: L of a signal.
        num_train: Training waves.
        num_val: Validation waves.
        batch_size: Samples per training batch and process.
        **options: Of ``BaseDataModule``.
    """

    unit = "signals"

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        length: int = 64,
        num_train: int = 64,
        num_val: int = 16,
        batch_size: int = 8,
        **options: Any,
    ) -> None:
        super().__init__(root, batch_size=batch_size, **options)
        self.input_shape = (1, check_minimum("length", length, 4))
        self.counts = check_minimum("num_train", num_train, 1), check_minimum("num_val", num_val, 1)

    def build(self) -> dict[Split, SeededDataset]:
        """Make the waves of both splits."""
        train, val = (
            self.seeded(Waves(count, self.input_shape[1], number), f"wave {{}} of {count}".format)
            for number, count in enumerate(self.counts)
        )
        return {"train": train, "val": val}

    def unlabelled_dataset(self, inputs: Any) -> NamedDataset:
        """Return the signals of a .npy file or of a folder of them."""
        files = Files(Path(inputs))
        return TolerantDataset(files, files.name)


def sample(signal: Any, number: float, index: int) -> dict[str, Tensor]:
    """Return a sample as the data module gives it."""
    return {
        "signal": torch.as_tensor(np.asarray(signal, np.float32)).view(1, -1),
        "number": torch.tensor(number),
        "sample_id": torch.tensor(index),
    }
