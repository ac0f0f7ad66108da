"""What all datamodules share: options, loaders that resume exactly, and the order of setup."""

from __future__ import annotations

import copy
import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from lightning import LightningDataModule
from PIL import Image
from torch.utils.data import DataLoader, default_collate

from datamodules.files import first_few, refuse_system_folder
from datamodules.files.class_order import ClassOrder, other_orders
from datamodules.files.console import say
from datamodules.files.headers import check_each
from datamodules.files.pictures import Pictures, as_images
from datamodules.loading.memory import FLOAT, refuse_larger
from datamodules.loading.sampling import (
    EpochSampler,
    EvalSampler,
    NamedDataset,
    SeededDataset,
    SizedDataset,
    TolerantDataset,
    Unreadable,
    process_group,
    readable,
)
from datamodules.loading.shared_memory import check_shared_memory
from datamodules.loading.workers import Loader, become_worker, end_slow_workers

# More loader processes than these only fill the memory.
WORKERS_PER_CORE, MANY_WORKERS = 8, 32
TRIED = 100  # images that a preview looks at in place of broken ones
Split = Literal["train", "val", "predict"]
SPLITS: dict[Split, str] = {"val": "validation", "train": "training"}


class BaseDataModule(LightningDataModule):
    """One dataset layout on disk; a subclass checks it and builds its datasets in ``build``.

    Args:
        root: Folder of the dataset.
        batch_size: Samples per training batch and process.
        eval_batch_size: The same for evaluation; None means ``batch_size``.
        num_workers: Loader processes per training process; 0 loads in the process itself.
        seed: Decides order and augmentation; results do not depend on ``num_workers``.
        predict_path: Image or folder to predict; None means the validation images.

    Attributes:
        class_names: Names of the classes, in label order; known after ``setup``.
        category_ids: What the files of the set call each label, where that is not the label.
        class_order: In which names of folders become labels; None if the files number the classes.
        upright: Whether images are turned as their EXIF orientation says.
        layout: What the folder must look like, for error messages.
        repeated_augmentation: How often a training sample comes in a row; see ``EpochSampler``.
        fixed_order: Whether each epoch has the batches of the first one.
        example: The command-line options that select this dataset, for error messages.
        told_absent: Whether it is known, and was said, which classes validation lacks.
        parts: Of data that are evaluated part by part, what there is; see ``robustness``.
        left_out: What an option leaves out of evaluation, in words; known after ``setup``.
    """

    layout: ClassVar[str] = ""
    example: ClassVar[str] = ""
    upright: ClassVar[bool] = False
    class_names: tuple[str, ...] = ()
    category_ids: tuple[int, ...] = ()
    class_order: ClassOrder | None = None
    repeated_augmentation: int = 1
    fixed_order: bool = False
    told_absent: bool = False
    parts: Sequence[Any] = ()
    left_out: str = ""
    made_by: dict[str, Any]

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Keep the keyword arguments as ``made_by``, which checkpoints say."""
        made: Any = super().__new__(cls)
        own = {key: value for key, value in options.items() if key not in ("seed", "predict_path")}
        made.made_by = {"_target_": f"{cls.__module__}.{cls.__qualname__}", **own}
        return made

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
        self.num_workers = at_least("num_workers", num_workers, 0)
        most = max(MANY_WORKERS, WORKERS_PER_CORE * (os.cpu_count() or 1))
        if num_workers > most:
            raise ValueError(
                f"data.num_workers={num_workers} is too many: {os.cpu_count()} cores serve at most "
                f"{most}, and one or two a core are usual"
            )
        self.seed = at_least("seed", seed, 0)
        self.predict_path = predict_path
        self._datasets: dict[Split, NamedDataset] = {}
        self._resume_at = (0, 0)

    def set_batch_size(self, batch_size: int, eval_batch_size: int | None = None) -> None:
        """Set the samples per batch and process; None evaluates in batches as large as training."""
        self.batch_size = at_least("batch_size", batch_size, 1)
        eval_batch_size = batch_size if eval_batch_size is None else eval_batch_size
        self.eval_batch_size = at_least("eval_batch_size", eval_batch_size, 1)

    def check_memory(self, size: tuple[int, int], options: str) -> None:
        """Refuse batches that are larger than the machine's memory.

        Args:
            size: Height and width of the largest image of a batch.
            options: What decides it, for the message.

        Raises:
            ValueError: Names the size of a batch.
        """
        height, width = size
        for name in ("batch_size", "eval_batch_size"):
            count = getattr(self, name)
            refuse_larger(
                f"a batch of {count:,} images of {height:,}x{width:,} pixels (data.{name})",
                count * 3 * height * width * FLOAT,
                f"lower data.{name} or {options}",
            )

    @property
    def num_classes(self) -> int:
        """Number of classes; known after ``setup``."""
        if not self.class_names:
            raise ValueError(
                f"{type(self).__name__} knows its classes only after setup(); call it first"
            )
        return len(self.class_names)

    @property
    def other_orders(self) -> dict[str, tuple[str, ...]]:
        """The classes by each other ``data.class_order`` that would number them differently."""
        return other_orders(self.class_names, self.class_order)

    @property
    def folder(self) -> Path:
        """The dataset's folder, existing."""
        if self.root is None:
            raise ValueError(
                f"{type(self).__name__} needs the folder of the dataset: pass {self.example} "
                f"({self.layout})"
            )
        if not self.root.is_dir():
            raise FileNotFoundError(
                f"data.root {self.root} is not a folder; pass the folder that holds {self.layout}"
            )
        refuse_system_folder(self.root)
        return self.root

    def setup(self, stage: str | None = None) -> None:
        """Check everything on disk and build the datasets; later calls do nothing."""
        if not self._datasets:
            self._datasets = {**self.build()}
            if self.predict_path is not None:
                self.take(self.predict_path)

    def predict_only(self, class_names: Sequence[str], category_ids: Sequence[int] = ()) -> None:
        """Know the classes from elsewhere and serve prediction, so that no data set is needed."""
        self.class_names, self.category_ids = tuple(class_names), tuple(category_ids)
        if self.predict_path is not None:
            self.take(self.predict_path)

    def take(self, images: Any) -> None:
        """Let prediction see these images; see ``as_images`` for what they may be."""
        self._datasets["predict"] = self._pictures(images)

    def serving(self, images: Any) -> Self:
        """Return a copy of this datamodule that predicts these images and leaves this one as it is.

        So calls in several threads share no images; see ``as_images`` for what they may be.
        """
        served = copy.copy(self)
        served._datasets = {**self._datasets, "predict": self._pictures(images)}
        return served

    def _pictures(self, images: Any) -> NamedDataset:
        pictures = Pictures(as_images(images), self.unlabelled, upright=self.upright)
        return TolerantDataset(pictures, pictures.name)

    def unlabelled(self, image: Image.Image, name: str, index: int) -> Any:
        """The sample of an image to predict, prepared as in evaluation.

        Args:
            image: 8-bit RGB.
            name: Its file, for messages and results.
            index: Its place among those to predict.
        """
        raise NotImplementedError

    def predict_name(self, index: int) -> str:
        """The file of a sample of ``predict_dataloader``."""
        return self._to_predict().describe(index)

    def predict_names(self) -> list[str]:
        """The files of ``predict_dataloader``."""
        return [self.predict_name(index) for index in range(len(self._to_predict()))]

    def check_files(self, seconds: float = 60.0) -> None:
        """Look at all files before training does, those of validation first; say how many.

        What is not wrong, but may not be meant, is said in further lines; see ``notices``.

        Args:
            seconds: The longest time; what is left then is checked when it is read.

        Raises:
            FileNotFoundError: One does not exist.
            ValueError: One is broken.
        """
        started = time.monotonic()
        looked, counts = [], dict.fromkeys(SPLITS, 0)
        for split, name in SPLITS.items():
            check = self.file_check(split)
            if check is not None:
                count = len(self.dataset(split))
                done = check_each(check, count, started + seconds)
                counts[split] = done
                looked.append(f"{done:,} of {count:,} {name} images")
        if looked:
            say(f"Files checked: {', '.join(looked)} ({time.monotonic() - started:.0f} s)")
        for line in self.notices(counts):
            say(line)

    def notices(self, looked: Mapping[Split, int]) -> list[str]:
        """What of the data may not be meant, a line each; for before a training.

        Args:
            looked: How many images of each split ``file_check`` has seen.
        """
        count = len(self.dataset("train"))
        if count >= self.batch_size:
            return []
        return [
            f"The training set has {count} image{'s' * (count != 1)}, fewer than data.batch_size="
            f"{self.batch_size}: each step has all of them"
        ]

    def absent_notice(self, absent: Sequence[int]) -> list[str]:
        """The notice of classes, by label, that no validation image has; none where all occur."""
        self.told_absent = True
        if not absent:
            return []
        named = first_few([self.class_names[label] for label in absent], 10)
        return [f"{len(absent)} of {self.num_classes} classes do not occur in validation: {named}"]

    def file_check(self, split: Split) -> Callable[[int], None] | None:
        """What looks at the files of a sample without decoding all; None if there are none."""
        return None

    def build(self) -> dict[Split, SeededDataset]:
        """Check the files, set ``class_names`` and return the datasets."""
        raise NotImplementedError

    def seeded(self, dataset: SizedDataset, describe: Callable[[int], str]) -> SeededDataset:
        """Wrap a dataset so that its samples depend on the run's seed only."""
        return SeededDataset(dataset, self.seed, describe)

    def resume_at(self, epoch: int, batches: int) -> None:
        """Let the next training iteration start after ``batches`` batches of ``epoch``.

        To be called before ``Trainer.fit`` makes its iterators: Lightning makes the first one, and
        its workers begin to load, before it tells the sampler the epoch.
        """
        self._resume_at = (epoch, batches)

    def on_exception(self, exception: BaseException) -> None:
        """End the loader processes within seconds where a run ends before its time."""
        end_slow_workers()

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled training batches; an incomplete one is left out unless it is the only one."""
        dataset = self.dataset("train")
        rank, world_size = process_group()
        sampler = EpochSampler(
            len(dataset),
            self.seed,
            repeats=self.repeated_augmentation,
            fixed=self.fixed_order,
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
        """Validation batches in the dataset's order."""
        return self._eval_loader("val")

    def test_dataloader(self) -> DataLoader[Any]:
        """The validation batches: none of the datasets publishes test labels beside them."""
        return self._eval_loader("val")

    def predict_dataloader(self) -> DataLoader[Any]:
        """Batches of ``predict_path``, or the validation batches."""
        return self._eval_loader("predict" if "predict" in self._datasets else "val")

    def preview_batch(self, count: int) -> Any:
        """A batch of up to ``count`` samples to draw, evenly spaced over what prediction sees.

        In place of broken images come others.
        """
        dataset = self._to_predict()
        spaced = range(0, len(dataset), max(1, len(dataset) // count))[:count]
        others = (index for index in range(min(len(dataset), TRIED)) if index not in spaced)
        samples = (dataset[0, index] for index in itertools.chain(spaced, others))
        kept = (sample for sample in samples if not isinstance(sample, Unreadable))
        return (self.collate() or default_collate)(list(itertools.islice(kept, len(spaced))))

    def sizes(self) -> dict[str, int]:
        """Images of each split that there is."""
        return {split: len(dataset) for split, dataset in self._datasets.items()}

    def batches(self, split: Literal["train", "val"], world_size: int) -> int:
        """Batches of an epoch in the one of so many processes that has fewest."""
        count = len(self.dataset(split)) // world_size
        if split == "val":
            return max(-(-count // self.eval_batch_size), 1)  # see ``EvalSampler``
        return max(count // self.batch_size, 1)  # an incomplete one counts if it is the only one

    def _to_predict(self) -> NamedDataset:
        return self.dataset("predict" if "predict" in self._datasets else "val")

    def dataset(self, split: Split) -> NamedDataset:
        """The dataset of a split, which ``setup`` must have built."""
        if split not in self._datasets:
            raise ValueError(f"{type(self).__name__} has no {split} data yet; call setup() first")
        return self._datasets[split]

    def collate(self) -> Callable[[list[Any]], Any] | None:
        """The function that makes a batch of samples; None for torch's own."""
        return None

    def _eval_loader(self, split: Split) -> DataLoader[Any]:
        return self._eval_loader_of(self.dataset(split))

    def _eval_loader_of(self, dataset: NamedDataset) -> DataLoader[Any]:
        rank, world_size = process_group()
        sampler = EvalSampler(len(dataset), rank=rank, world_size=world_size)
        return self._loader(dataset, sampler, self.eval_batch_size, drop_last=False)

    def _loader(
        self,
        dataset: NamedDataset,
        sampler: EpochSampler | EvalSampler,
        batch_size: int,
        *,
        drop_last: bool,
    ) -> DataLoader[Any]:
        if self.num_workers:
            check_shared_memory("data.num_workers=0")
        collate = self.collate()
        if isinstance(dataset, TolerantDataset):
            collate = partial(readable, collate or default_collate)
        return Loader(
            dataset,
            batch_size=batch_size,
            sampler=sampler,
            num_workers=self.num_workers,
            collate_fn=collate,
            pin_memory=torch.cuda.is_available(),
            drop_last=drop_last,
            persistent_workers=self.num_workers > 0,
            worker_init_fn=become_worker,
            # An own generator: making an iterator must not draw from the global one.
            generator=torch.Generator().manual_seed(self.seed),
        )


def probability(name: str, value: float) -> float:
    """The value, if it is a probability."""
    if not 0 <= value <= 1:
        raise ValueError(f"data.{name}={value} is no probability; give a number from 0 to 1")
    return value


def range_of(name: str, value: Sequence[float]) -> tuple[float, float]:
    """A range given as its smallest and largest value."""
    ends = tuple(float(end) for end in value)
    if len(ends) != 2 or not 0 < ends[0] <= ends[1]:
        raise ValueError(
            f"data.{name}={list(value)} is no range; give two factors, such as [0.8,1.2]"
        )
    return ends


def at_least(name: str, value: int, lowest: int) -> int:
    """The value, if it is not too low."""
    if value < lowest:
        raise ValueError(f"data.{name}={value} is too low; the lowest value is {lowest}")
    return value
