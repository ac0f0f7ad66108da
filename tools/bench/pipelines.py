"""Time image pipelines, from file to batch: our data modules against timm's and the toolkits'.

Both read the same training files with the same augmentation, in interleaved batches, in this
process: the work of one loader worker. Ours also seeds each sample and names broken files.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader

from datamodules import (
    ADE20KDataModule,
    BaseDataModule,
    CocoDataModule,
    ImageFolderDataModule,
    SampleClassification,
    SampleDetection,
    SampleSegmentation,
)
from datamodules.dense.masks import StrictMask
from datamodules.dense.toolkit_data import StrictImage
from datamodules.images.transforms import PaperAugmentation, guard_posterize
from tasks.engine.family import find_family, imported
from tools.bench.timing import interleave, print_status, set_up_process, summarise_ratios
from tools.cli.arguments import parse_integer
from tools.cli.tables import Record

# Sides of sample images, close to those of the usual datasets.
PHOTOGRAPH, SCENE = 384, 512
# Our datamodule, the library of the other loader of its files, and the function that builds it.
Pipeline = tuple[BaseDataModule, str, Callable[[Any], DataLoader[Any]]]


def time_pipelines(options: Mapping[str, str]) -> list[Record]:
    """Time batches of a task's training data; return a record of the other pipeline and of ours."""
    rounds = parse_integer("rounds", options["rounds"], least=2)
    batch = parse_integer("batch", options["batch"])
    set_up_process(options)
    pipeline = imported(find_family(options["task"]).pipeline, __name__)
    ours, name, load = pipeline(options["root"] or None, batch)
    with contextlib.redirect_stdout(sys.stderr):  # the toolkits print on import
        ours.prepare_data()
        ours.setup()
        loader = load(ours)
    print_status(f"{options['task']}: {len(ours.dataset('train'))} images of {ours.folder}")
    # Timm's loader normalises, too; on a device our part of it spares the workers.
    our_batches = map(ours.normalise, repeat_batches(ours.train_dataloader()))
    batches = [repeat_batches(loader), our_batches]
    steps = [lambda batches=iterator: next(batches) and None for iterator in batches]
    seconds = interleave(steps, rounds, "cpu", options["clock"])
    return [
        {
            "task": options["task"],
            "pipeline": label,
            "batch": batch,
            "images_per_second": batch / statistics.median(times),
            **summarise_ratios(times, seconds[0]),
        }
        for label, times in zip((name, "ours"), seconds, strict=True)
    ]


def class_folders(root: str | None, batch: int) -> Pipeline:
    """Return class folders, by default of sample digits, and timm's loader.

    Args:
        root: Folder of real data; None for sample data.
        batch: Images per batch.
    """
    options: dict[str, Any] = {"batch_size": batch, "num_workers": 0}
    if root is None:
        sample = SampleClassification(picture_size=PHOTOGRAPH, digits_per_class=20, **options)
        sample.prepare_data()
        root = str(sample.folder)
    return ImageFolderDataModule(root, image_size=224, **options), "timm", build_timm_loader


def coco(root: str | None, batch: int) -> Pipeline:
    """Return COCO's layout, by default of sample scenes, and MMDetection's loader."""
    options: dict[str, Any] = {"batch_size": batch, "num_workers": 0}
    if root is not None:
        return CocoDataModule(root, **options), "mmdet", build_toolkit_loader
    sample = SampleDetection(scene_size=SCENE, num_train=64, num_val=4, flip=0.5, **options)
    return sample, "mmdet", build_toolkit_loader


def ade20k(root: str | None, batch: int) -> Pipeline:
    """Return ADE20K's layout, by default of sample scenes, and MMSegmentation's loader."""
    options: dict[str, Any] = {"batch_size": batch, "num_workers": 0}
    if root is not None:
        return ADE20KDataModule(root, **options), "mmseg", build_toolkit_loader
    sample = SampleSegmentation(scene_size=SCENE, num_train=64, num_val=4, **options)
    return sample, "mmseg", build_toolkit_loader


def build_timm_loader(ours: ImageFolderDataModule) -> DataLoader[Any]:
    """Build timm's dataset and loader with our augmentation."""
    from timm.data import ImageDataset, create_loader

    how = ours.augmentation
    assert isinstance(how, PaperAugmentation)
    dataset_class: Any = ImageDataset  # untyped in timm
    loader: Any = create_loader(
        dataset_class(str(ours.folder / "train")),
        input_size=(3, ours.image_size, ours.image_size),
        batch_size=ours.batch_size,
        is_training=True,
        use_prefetcher=False,
        re_prob=how.random_erasing,
        re_mode="pixel",
        scale=(how.crop_scale[0], how.crop_scale[1]),
        ratio=(how.crop_ratio[0], how.crop_ratio[1]),
        hflip=how.flip,
        color_jitter=how.color_jitter,
        auto_augment=how.auto_augment,
        interpolation=how.interpolation,
        mean=tuple(how.mean),
        std=tuple(how.std),
        num_workers=0,
        persistent_workers=False,
        pin_memory=False,
    )
    guard_posterize(loader.dataset.transform)  # posterize would raise at random
    return loader


def build_toolkit_loader(ours: Any) -> DataLoader[Any]:
    """Build the toolkit's dataset with its own reading, packing and order of steps."""
    from mmcv.transforms import LoadImageFromFile
    from mmengine.dataset import Compose, DefaultSampler, pseudo_collate
    from mmseg.datasets.transforms import LoadAnnotations

    dataset = copy.copy(ours.dataset("train").dataset)
    readers = {StrictImage: LoadImageFromFile, StrictMask: LoadAnnotations}
    steps = [
        readers[type(step)]() if type(step) in readers else step for step in ours.train_steps()
    ]
    steps[-1] = steps[-1].pack
    dataset.pipeline = Compose(steps)
    return DataLoader(
        dataset,
        batch_size=ours.batch_size,
        sampler=DefaultSampler(dataset, shuffle=True, seed=0),
        collate_fn=pseudo_collate,
        drop_last=True,
    )


def repeat_batches(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yield batches endlessly, each epoch with its own random numbers."""
    for epoch in itertools.count():
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        yield from loader
