"""Base of datamodules that generate small datasets in the real formats."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from datamodules.base import BaseDataModule, check_minimum
from datamodules.files.cache import cache_root, sample_folder
from datamodules.files.console import log
from datamodules.loading.memory import format_bytes

if TYPE_CHECKING:
    from datamodules.sample.digits import SampleSplit

MOST_BYTES = 10_000_000_000  # of uncompressed sample images


class SampleDataModule(BaseDataModule):
    """Base of datamodules that generate their files before the other parent class reads them.

    Attributes:
        base: Folder of all sample datasets.
        set_name: Folder of this dataset, named by everything that its bytes depend on.
    """

    base: Path
    set_name: str

    def write(self, folder: Path) -> None:
        """Write the dataset into an empty folder."""
        raise NotImplementedError

    def prepare_data(self) -> None:
        """Generate the dataset if it is missing, and log that the data are samples."""
        if self._datasets:  # only images to predict, which need no dataset
            return
        folder = sample_folder(self.base, self.set_name, self.write)
        if self.root != folder:
            self.root = folder
            log(f"Sample data in {folder}; for a real dataset pass {self.example}")

    def setup(self, stage: str | None = None) -> None:
        """Generate the dataset if it is missing, check it and build the datasets."""
        self.prepare_data()
        super().setup(stage)

    def _describe(
        self,
        kind: str,
        root: str | Path | None,
        size: int,
        counts: dict[SampleSplit, int],
        seed: int,
        pictures_per_count: int = 1,
    ) -> None:
        self.base = Path(root).expanduser() if root is not None else cache_root()
        self.counts = {
            split: check_minimum(f"the size of {split}", count, 1)
            for split, count in counts.items()
        }
        self.picture_size = check_minimum("the picture size", size, 32)
        self.sample_seed = check_minimum("sample_seed", seed, 0)
        pictures = sum(counts.values()) * pictures_per_count
        check_size(pictures, size)
        self.set_name = f"{kind}-{size}px-{counts['train']}-{counts['val']}-seed{seed}"


def check_size(pictures: int, side: int) -> None:
    """Raise an error for sample data that would take hours and fill the disk.

    Raises:
        ValueError: The images take too much space; the message names their size.
    """
    size = 3 * pictures * side**2
    if size > MOST_BYTES:
        raise ValueError(
            f"{pictures:,} sample images of {side}x{side} pixels take {format_bytes(size)}, but at "
            f"most {format_bytes(MOST_BYTES)} are allowed; make fewer or smaller ones"
        )
