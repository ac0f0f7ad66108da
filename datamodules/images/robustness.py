"""One or all of ImageNet's robustness sets, part by part."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from datamodules.base import Split
from datamodules.files import first_few
from datamodules.files.class_order import ClassOrder, checked_order
from datamodules.files.console import say
from datamodules.images.classification import ClassificationDataModule
from datamodules.images.robustness_sets import (
    IMAGES,
    SUBSETS,
    USUAL,
    Found,
    Part,
    find,
    locate,
    on_subset,
)
from datamodules.images.transforms import Augmentation
from datamodules.loading.sampling import SeededDataset

PUBLISHED_SIDE = 224  # of ImageNet-C's files, which are not resized


class RobustnessDataModule(ClassificationDataModule):
    """Sets that only evaluate: their parts come one after the other, chosen by ``choose``.

    Args:
        root: The folder of the set, or one that holds several under their usual names.
        sets: Which ones, of ``IMAGES``.
        roots: Folders of single sets, which go before ``root``.
        crop_pct: Share of the resized image's side that is seen: 0.875, 224 of 256, as the sets'
            authors do; ImageNet-C is never cropped. An augmentation that sees whole images stays.
        published_counts: Whether a set without the published number of images is incomplete.
        class_order: Of a copy of other class folders in ImageNet-C's layout, as in
            ``ImageFolderDataModule``.
        **options: Of ``ClassificationDataModule``.

    Attributes:
        found: Each set that is there.
        absent: The others.
    """

    layout = (
        "the class folders of one set, or one folder a set: imagenet-c, imagenet-a, imagenet-r, "
        "sketch, imagenetv2-matched-frequency-format-val, imagenet"
    )
    example = "data=robustness data.root=/data"

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        sets: Sequence[str] = tuple(IMAGES),
        roots: Mapping[str, str | None] | None = None,
        crop_pct: float = 0.875,
        published_counts: bool = True,
        class_order: ClassOrder = "text",
        **options: Any,
    ) -> None:
        super().__init__(root, **options)
        unknown = [name for name in (*sets, *(roots or {})) if name not in IMAGES]
        if unknown or not sets:
            raise ValueError(f"data.sets and data.roots name sets of {', '.join(IMAGES)}")
        if not 0 < crop_pct <= 1:
            raise ValueError(f"data.crop_pct={crop_pct} must be above 0 and at most 1")
        self.sets, self.roots = tuple(sets), dict(roots or {})
        self.class_order = checked_order(class_order)
        self.crop_pct, self.published_counts = crop_pct, published_counts
        self.found: dict[str, Found] = {}
        self.absent: tuple[str, ...] = ()
        self.parts: tuple[Part, ...] = ()

    def build(self) -> dict[Split, SeededDataset]:
        """Find the sets; those that are not there are said, unless it is the only one."""
        alone = len(self.sets) == 1
        given = {name: self.roots.get(name) for name in self.sets}
        root = None if all(given.values()) else self.folder
        for name in self.sets:
            place = locate(name, root, given[name], alone=alone)
            if place is not None:
                self.found[name] = find(
                    name,
                    place,
                    published=self.published_counts,
                    class_order=self.class_order,
                )
        self.absent = tuple(name for name in self.sets if name not in self.found)
        if not self.found:
            names = [usual for name in self.sets for usual in USUAL[name][:1]]
            raise FileNotFoundError(
                f"{root} holds none of the sets: no folder {' or '.join(names)}; pass data.roots, "
                "such as data.roots.imagenet_a=/data/imagenet-a"
            )
        if self.absent:
            say(f"Not in {root}: {', '.join(self.absent)}")
        for name, found in self.found.items():
            for line in found.lacks[:1]:
                more = f" (and {len(found.lacks) - 1} more)" if len(found.lacks) > 1 else ""
                say(f"{name} is incomplete: {line}{more}")
        classes = {found.class_names for found in self.found.values()}
        if len(classes) > 1:
            raise ValueError(
                "imagenet_c holds other classes than ImageNet's, so that no network serves it and "
                "the other sets; evaluate it alone with data=imagenet_c"
            )
        (self.class_names,) = classes
        if "imagenet_c" in self.found and self.image_size != PUBLISHED_SIDE:
            say(
                f"imagenet_c is evaluated as stored, resized to {self.image_size} where it has "
                "another size; published figures are of 224 pixels"
            )
        self.parts = self._listed()
        return {"val": self._dataset(self.parts[0])}

    def _listed(self) -> tuple[Part, ...]:
        """All that is evaluated, in order; of incomplete sets what there is of ImageNet-C."""
        parts: list[Part] = []
        for name, found in self.found.items():
            if not found.lacks or name == "imagenet_c":
                parts += found.parts
        clean = self.found.get("imagenet")
        if clean is not None and not clean.lacks:
            # What networks lose on A and R shows beside ImageNet's images of the same classes.
            pairs = [name for name in SUBSETS if name in self.found]
            parts += [on_subset(clean.parts[0], name) for name in pairs]
        if not parts:
            lacks = [line for found in self.found.values() for line in found.lacks]
            raise ValueError(
                f"no set is complete: {first_few(lacks)}; restore it, or pass "
                "data.published_counts=false for a stand-in"
            )
        return tuple(parts)

    def choose(self, part: Part) -> None:
        """Let ``val_dataloader``, ``test_dataloader`` and pictures see this part."""
        self._datasets["val"] = self._dataset(part)

    def check_files(self, seconds: float = 60.0) -> None:
        """Refuse to train: these sets have nothing to train with.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "these sets only evaluate: pass mode=test ckpt=<run folder or checkpoint file>"
        )

    def sizes(self) -> dict[str, int]:
        """Images of each set that is evaluated."""
        sizes: dict[str, int] = {}
        for part in self.parts:
            name = part.name.split("/")[0]
            if part.name == name or name == "imagenet_c":
                sizes[name] = sizes.get(name, 0) + len(part.files)
        return sizes

    def _dataset(self, part: Part) -> SeededDataset:
        crop = 1.0 if part.name.startswith("imagenet_c/") else self.crop_pct
        augmentation: Augmentation = self.augmentation
        if hasattr(augmentation, "crop_pct"):
            augmentation = dataclasses.replace(augmentation, crop_pct=crop)  # type: ignore[type-var]
        return self.files(part.folder, part.files, part.labels, augmentation.eval(self.image_size))
