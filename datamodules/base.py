"""Base of all datamodules: options, loaders that resume exactly, and the order of setup."""

from __future__ import annotations

import copy
import itertools
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from lightning import LightningDataModule
from torch.utils.data import DataLoader, default_collate

from datamodules.files.console import log
from datamodules.files.folders import reject_system_folder
from datamodules.files.values import check_option
from datamodules.loading.sampling import (
    EpochSampler,
    EvalSampler,
    NamedDataset,
    SeededDataset,
    SizedDataset,
    TolerantDataset,
    Unreadable,
    collate_readable,
    process_group,
)
from datamodules.loading.workers import Loader, end_slow_workers, init_worker

# Limits of loader processes; further ones only fill the memory.
WORKERS_PER_CORE, MANY_WORKERS = 8, 32
TRIED = 100  # samples that a preview tries in place of broken ones
Split = Literal["train", "val", "test", "predict"]
SPLITS: dict[Split, str] = {"val": "validation", "train": "training"}
TEST_SPLIT: dict[Split, str] = {"test": "test"}  # of data whose test has samples of its own


class BaseDataModule(LightningDataModule):
    """Base of one dataset layout on disk; subclasses check it and build datasets in ``build``.

    Args:
        root: Folder of the dataset.
        batch_size: Samples per training batch and process.
        eval_batch_size: Samples per evaluation batch and process; None means ``batch_size``.
        num_workers: Loader processes per training process; 0 loads in the process itself.
        seed: Seed of order and augmentation; results are the same for any ``num_workers``.
        predict_path: File or folder to predict; None means the validation data.

    Attributes:
        unit: Name of its samples, in the plural.
        input_shape: Shape of one input without its batch; empty for images, which have options.
        layout: Expected contents of the folder, for error messages.
        repeated_augmentation: Repetitions of each training sample; see ``EpochSampler``.
        fixed_order: True if every epoch uses the order of the first one.
        fixed_size: True if all inputs have one size, in training and evaluation.
        example: Command-line options that select this dataset, for error messages.
        parts: Subsets that are evaluated one by one; see ``robustness``.
        held_out: Share of the training samples that is evaluated instead of the validation or test
            data; 0 for none.
        left_out: Description of what an option excludes from evaluation; known after ``setup``.
        made_by: Keyword arguments and ``_target_`` that rebuild this datamodule.
    """

    input_shape: tuple[int, ...] = ()
    layout: ClassVar[str] = ""
    example: ClassVar[str] = ""
    unit: ClassVar[str] = "samples"
    repeated_augmentation: int = 1
    fixed_order: bool = False
    fixed_size: ClassVar[bool] = False
    parts: Sequence[Any] = ()
    held_out: float = 0.0
    left_out: str = ""
    made_by: dict[str, Any]

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Record the keyword arguments as ``made_by``, which checkpoints store."""
        module: Any = super().__new__(cls)
        arguments = {
            key: value for key, value in options.items() if key not in ("seed", "predict_path")
        }
        module.made_by = {"_target_": f"{cls.__module__}.{cls.__qualname__}", **arguments}
        return module

    def __init__(
        self,
        root: str | Path | None,
        *,
        batch_size: int,
        eval_batch_size: int | None = None,
        num_workers: int = 2,
        seed: int = 0,
        predict_path: str | Path | None = None,
    ) -> None:
        super().__init__()
        self.root = None if root is None else Path(root).expanduser()
        self.set_batch_size(batch_size, eval_batch_size)
        most = max(MANY_WORKERS, WORKERS_PER_CORE * (os.cpu_count() or 1))
        rule = f"at most {most} with {os.cpu_count()} cores; one or two per core are usual"
        check_option("num_workers", num_workers, num_workers <= most, rule)
        self.num_workers = check_minimum("num_workers", num_workers, 0)
        self.seed = check_minimum("seed", seed, 0)
        self.predict_path = predict_path
        self._datasets: dict[Split, NamedDataset] = {}
        self._resume_at = (0, 0)

    def set_batch_size(self, batch_size: int, eval_batch_size: int | None = None) -> None:
        """Set the samples per batch and process; ``eval_batch_size`` defaults to ``batch_size``."""
        self.batch_size = check_minimum("batch_size", batch_size, 1)
        eval_batch_size = batch_size if eval_batch_size is None else eval_batch_size
        self.eval_batch_size = check_minimum("eval_batch_size", eval_batch_size, 1)

    @property
    def folder(self) -> Path:
        """Folder of the dataset, checked to exist."""
        if self.root is None:
            raise ValueError(
                f"{type(self).__name__} needs the folder of the dataset: pass {self.example} "
                f"({self.layout})"
            )
        if not self.root.is_dir():
            raise FileNotFoundError(
                f"data.root {self.root} is not a folder; pass the folder that holds {self.layout}"
            )
        reject_system_folder(self.root)
        return self.root

    def setup(self, stage: str | None = None) -> None:
        """Check everything on disk and build the datasets; later calls return at once."""
        if not self._datasets:
            self._datasets = {**self.build()}
            if self.held_out:
                self._datasets |= self.divide()
            if self.predict_path is not None:
                self.set_predict_inputs(self.predict_path)

    def divide(self) -> dict[Split, NamedDataset]:
        """Return datasets without the test's samples, for a choice of settings before the test.

        With a test split of its own, a dataset is evaluated by its validation split instead.

        Raises:
            ValueError: The layout cannot divide its training samples.
        """
        if "test" in self._datasets:
            return {"test": self._datasets["val"]}
        raise ValueError(
            f"held_out={self.held_out}, but {type(self).__name__} cannot divide its training "
            f"{self.unit}; leave it out"
        )

    def measured_options(self) -> dict[str, Any]:
        """Return the options that were measured on the training data; known after ``setup``."""
        return {}

    @property
    def backbone_arguments(self) -> dict[str, Any]:
        """Options of a backbone that the data decide, such as the number of variables."""
        return {}

    @property
    def head_arguments(self) -> dict[str, Any]:
        """Arguments of a head besides the backbone, such as the number of classes."""
        return {}

    @property
    def task_arguments(self) -> dict[str, Any]:
        """Arguments of a task besides the model, such as the names of the classes."""
        return {}

    def target_facts(self) -> dict[str, Any]:
        """Return the entries of summary.json about the targets, named in ``Family.targets``."""
        return {}

    def target_identity(self) -> dict[str, Any]:
        """Return what distinguishes the targets from others, named in ``Family.targets``."""
        return {}

    def predict_only(self, *args: Any, **kwargs: Any) -> None:
        """Serve prediction alone, without reading a dataset; subclasses take the targets."""
        if self.predict_path is not None:
            self.set_predict_inputs(self.predict_path)

    def set_predict_inputs(self, inputs: Any) -> None:
        """Set the inputs to predict, in any form that ``unlabelled_dataset`` takes."""
        self._datasets["predict"] = self.unlabelled_dataset(inputs)

    def with_predict_inputs(self, inputs: Any) -> Self:
        """Return a copy that predicts these inputs; this datamodule stays unchanged.

        Calls in several threads therefore share no inputs.
        """
        served = copy.copy(self)
        served._datasets = {**self._datasets, "predict": self.unlabelled_dataset(inputs)}
        return served

    def unlabelled_dataset(self, inputs: Any) -> NamedDataset:
        """Return the dataset of inputs to predict, prepared as in evaluation.

        Args:
            inputs: A path, or the argument of a program's ``predict``.
        """
        raise NotImplementedError(f"{type(self).__name__} predicts its validation data only")

    def predict_name(self, index: int) -> str:
        """Return the file name of a sample of ``predict_dataloader``."""
        return self._to_predict().describe(index)

    def predict_names(self) -> list[str]:
        """Return the file names of all samples of ``predict_dataloader``."""
        return [self.predict_name(index) for index in range(len(self._to_predict()))]

    def check_files(self, seconds: float = 60.0) -> None:
        """Check all files before training, validation first, and log how many were checked.

        Findings that may be unintended are logged as well; see ``notices``.

        Args:
            seconds: Time limit; the remaining files are checked when they are read.

        Raises:
            FileNotFoundError: A file does not exist.
            ValueError: A file is broken.
        """
        started = time.monotonic()
        checked, counts = [], dict.fromkeys(SPLITS | TEST_SPLIT, 0)
        splits = SPLITS | (TEST_SPLIT if "test" in self._datasets else {})
        for split, name in splits.items():
            check = self.file_check(split)
            if check is not None:
                from datamodules.files.headers import check_each

                count = len(self.dataset(split))
                count_done = check_each(check, count, started + seconds)
                counts[split] = count_done
                checked.append(f"{count_done:,} of {count:,} {name} {self.unit}")
        if checked:
            log(f"Files checked: {', '.join(checked)} ({time.monotonic() - started:.0f} s)")
        for line in self.notices(counts):
            log(line)

    def notices(self, checked: Mapping[Split, int]) -> list[str]:
        """Return one line per finding in the data that may be unintended.

        Args:
            checked: Samples per split that ``file_check`` has seen.
        """
        count = len(self.dataset("train"))
        if count >= self.batch_size:
            return []
        return [
            f"The training set has {count} {self.unit[: None if count != 1 else -1]}, fewer than "
            f"data.batch_size={self.batch_size}: each step uses all of them"
        ]

    def file_check(self, split: Split) -> Callable[[int], None] | None:
        """Return a check of a sample's files by index; None to skip the check."""
        return None

    @abstractmethod
    def build(self) -> dict[Split, SeededDataset]:
        """Check the files and return the datasets; know the targets from then on."""

    def seeded(self, dataset: SizedDataset, describe: Callable[[int], str]) -> SeededDataset:
        """Wrap a dataset so that its samples depend on the run's seed alone."""
        return SeededDataset(dataset, self.seed, describe)

    def resume_at(self, epoch: int, batches: int) -> None:
        """Set the batch at which the next training iteration starts.

        Call this before ``Trainer.fit``: Lightning makes the first iterator, and its workers begin
        to load, before it passes the epoch to the sampler.
        """
        self._resume_at = (epoch, batches)

    def on_exception(self, exception: BaseException) -> None:
        """End the loader processes within seconds when a run fails."""
        end_slow_workers()

    def train_dataloader(self) -> DataLoader[Any]:
        """Return shuffled training batches; an incomplete one is dropped unless it is alone."""
        dataset = self.loaded("train")
        rank, world_size = process_group()
        sampler = EpochSampler(
            len(dataset),
            self.seed,
            repeats=self.repeated_augmentation,
            is_fixed=self.fixed_order,
            rank=rank,
            world_size=world_size,
        )
        epoch, batches = self._resume_at
        sampler.set_epoch(epoch)
        sampler.set_offset(batches * self.batch_size)
        self._resume_at = (0, 0)
        drop_last = len(sampler) > self.batch_size
        return self._loader(dataset, sampler, self.batch_size, drop_last=drop_last)

    def val_dataloader(self) -> DataLoader[Any]:
        """Return the validation batches in the dataset's order."""
        return self._eval_loader_of(self.loaded("val"))

    def test_dataloader(self) -> DataLoader[Any]:
        """Return the validation batches, as the datasets keep their test labels private."""
        return self._eval_loader_of(self.loaded("val"))

    def predict_dataloader(self) -> DataLoader[Any]:
        """Return the batches of ``predict_path``, or else the validation batches."""
        return self._eval_loader_of(self._to_predict())

    def normalise(self, batch: Any) -> Any:
        """Return a loader's batch as networks take it; unchanged by default.

        Images leave the loaders as bytes and become floats here, on their device.
        """
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Normalise a batch on the trainer's device, in the type of its precision."""
        normalised = self.normalise(batch)
        if normalised is batch or self.trainer is None:
            return normalised
        return self.trainer.precision_plugin.convert_input(normalised)

    def preview_batch(self, count: int) -> Any:
        """Return a batch of up to ``count`` samples to draw, evenly spaced over prediction's.

        Broken samples are replaced by others.
        """
        dataset = self._to_predict()
        spaced = range(0, len(dataset), max(1, len(dataset) // count))[:count]
        further = (index for index in range(min(len(dataset), TRIED)) if index not in spaced)
        samples = (dataset[0, index] for index in itertools.chain(spaced, further))
        readable = (sample for sample in samples if not isinstance(sample, Unreadable))
        collate = self.collate() or default_collate
        return self.normalise(collate(list(itertools.islice(readable, len(spaced)))))

    def sizes(self) -> dict[str, int]:
        """Return the number of samples per split."""
        return {split: len(dataset) for split, dataset in self._datasets.items()}

    def batches(self, split: Literal["train", "val"], world_size: int) -> int:
        """Return the batches per epoch, of the process that has fewest."""
        count = len(self.dataset(split)) // world_size
        if split == "val":
            return max(-(-count // self.eval_batch_size), 1)  # see ``EvalSampler``
        return max(count // self.batch_size, 1)  # an incomplete one counts if it is the only one

    def training_batch(self, world_size: int) -> int:
        """Return the samples per training batch and process; a small set has fewer than asked."""
        return min(self.batch_size, max(len(self.dataset("train")) // world_size, 1))

    def _to_predict(self) -> NamedDataset:
        return self.dataset("predict" if "predict" in self._datasets else "val")

    def dataset(self, split: Split) -> NamedDataset:
        """Return the dataset of a split, which ``setup`` must have built."""
        if split not in self._datasets:
            raise ValueError(
                f"{type(self).__name__} lacks {split} data before setup(); call it first"
            )
        return self._datasets[split]

    def loaded(self, split: Split) -> NamedDataset:
        """Return the dataset of a split as training and evaluation load it."""
        return self.dataset(split)

    def collate(self) -> Callable[[list[Any]], Any] | None:
        """Return the function that makes a batch of samples; None for torch's own."""
        return None

    def _eval_loader(self, split: Split) -> DataLoader[Any]:
        return self._eval_loader_of(self.dataset(split))

    def _eval_loader_of(self, dataset: NamedDataset) -> DataLoader[Any]:
        rank, world_size = process_group()
        sampler = EvalSampler(len(dataset), rank=rank, world_size=world_size)
        return self._loader(dataset, sampler, self.eval_batch_size, drop_last=False)

    def spaced_loader(self, split: Split, count: int) -> DataLoader[Any]:
        """Return batches of up to ``count`` samples of a split, evenly spaced, as in evaluation."""
        dataset = self.plain_dataset(split) if split == "train" else self.dataset(split)
        sampler = EvalSampler(len(dataset), world_size=max(1, -(-len(dataset) // count)))
        return self._loader(dataset, sampler, self.eval_batch_size, drop_last=False)

    def plain_dataset(self, split: Split) -> NamedDataset:
        """Return the dataset of a split, prepared as in evaluation."""
        return self.dataset(split)

    def _loader(
        self,
        dataset: NamedDataset,
        sampler: EpochSampler | EvalSampler,
        batch_size: int,
        *,
        drop_last: bool,
    ) -> DataLoader[Any]:
        resident = dataset.is_resident
        num_workers = 0 if resident else self.num_workers
        if num_workers:
            from datamodules.loading.memory import check_shared_memory

            check_shared_memory("data.num_workers=0 (num_workers=0 in Python)")
        trainer: Any = self.trainer
        collate = _unchanged if resident else self.collate()
        if isinstance(dataset, TolerantDataset):
            collate = partial(collate_readable, collate or default_collate)
        return Loader(
            dataset,
            batch_size=batch_size,
            sampler=sampler,
            num_workers=num_workers,
            collate_fn=collate,
            # Pinning starts CUDA, also where a run uses the CPU of a machine with a busy GPU.
            pin_memory=not resident
            and trainer is not None
            and trainer.strategy.root_device.type == "cuda",
            drop_last=drop_last,
            persistent_workers=num_workers > 0,
            worker_init_fn=init_worker,
            # Its own generator: making an iterator must not draw from the global one.
            generator=torch.Generator().manual_seed(self.seed),
        )


def _unchanged(batch: Any) -> Any:
    return batch


def check_share(name: str, value: float) -> float:
    """Return the value after a check that it is a share or probability."""
    return check_option(name, value, 0 <= value <= 1, "a share or probability from 0 to 1")


def check_range(name: str, value: Sequence[float]) -> tuple[float, float]:
    """Return a range as its smallest and largest value after a check."""
    ends = tuple(float(end) for end in value)
    valid = len(ends) == 2 and 0 < ends[0] <= ends[1]
    rule = "two positive factors in ascending order, such as [0.8,1.2]"
    check_option(name, [*value], valid, rule)
    return ends  # type: ignore[return-value]


def check_minimum(name: str, value: int, lowest: int) -> int:
    """Return the value after a check of its lower limit."""
    if value < lowest:
        raise ValueError(f"data.{name}={value} is too low; the lowest value is {lowest}")
    return value
