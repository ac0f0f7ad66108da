"""ImageNet's robustness datasets, one or all, evaluated part by part."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from datamodules.base import Split
from datamodules.files.class_order import ClassOrder
from datamodules.files.console import log
from datamodules.files.values import check_option, refuse
from datamodules.images.classification import ClassificationDataModule
from datamodules.images.robustness_sets import (
    IMAGES,
    SUBSETS,
    USUAL,
    FoundSet,
    Part,
    find_set,
    locate_set,
    restrict_to_subset,
)
from datamodules.images.transforms import Augmentation
from datamodules.loading.sampling import SeededDataset

PUBLISHED_SIDE = 224  # pixels of ImageNet-C's files, which stay unresized


class RobustnessDataModule(ClassificationDataModule):
    """Datasets for evaluation only; ``choose`` selects one of their parts at a time.

    Layout: the class folders of one dataset, or one folder per dataset: ``imagenet-c``,
    ``imagenet-a``, ``imagenet-r``, ``sketch``, ``imagenetv2-matched-frequency-format-val``,
    ``imagenet``.

    Sources: https://github.com/hendrycks/robustness,
    https://github.com/hendrycks/natural-adv-examples, https://github.com/hendrycks/imagenet-r,
    https://github.com/HaohanWang/ImageNet-Sketch, https://github.com/modestyachts/ImageNetV2.

    Args:
        root: Folder of the dataset, or one that holds several under their usual names.
        sets: Names of the datasets, of ``IMAGES``.
        roots: Folders of single datasets, which override ``root``.
        crop_pct: Crop as a share of the resized image's side; 0.875 (224 of 256) as the authors.
            ImageNet-C and augmentations without a crop are left uncropped.
        published_counts: Require the published number of images for a dataset to be complete.
        class_order: As in ``ImageFolderDataModule``, for copies of other classes in ImageNet-C's
            layout.
        **options: Options of ``ClassificationDataModule``.

    Attributes:
        found: Each dataset that exists.
        absent: Names of the others.
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
        strays = [name for name in (*sets, *(roots or {})) if name not in IMAGES]
        rule = f"sets of {', '.join(IMAGES)}"
        check_option("sets and data.roots", [*sets, *(roots or {})], sets and not strays, rule)
        check_option("crop_pct", crop_pct, 0 < crop_pct <= 1, "above 0 and at most 1")
        self.sets, self.roots = tuple(sets), dict(roots or {})
        self.class_order = class_order
        self.crop_pct, self.published_counts = crop_pct, published_counts
        self.found: dict[str, FoundSet] = {}
        self.absent: tuple[str, ...] = ()
        self.parts: tuple[Part, ...] = ()

    def build(self) -> dict[Split, SeededDataset]:
        """Find the datasets and log those that are missing; raise an error if all are."""
        is_alone = len(self.sets) == 1
        folders = {name: self.roots.get(name) for name in self.sets}
        root = None if all(folders.values()) else self.folder
        for name in self.sets:
            place = locate_set(name, root, folders[name], may_be_root=is_alone)
            if place is not None:
                self.found[name] = find_set(
                    name,
                    place,
                    published=self.published_counts,
                    class_order=self.class_order,
                )
        self.absent = tuple(name for name in self.sets if name not in self.found)
        if not self.found:
            names = [usual for name in self.sets for usual in USUAL[name][:1]]
            raise FileNotFoundError(
                f"{root} must hold one of the folders {' or '.join(names)}; add one, or pass "
                "data.roots, such as data.roots.imagenet_a=/data/imagenet-a"
            )
        if self.absent:
            log(f"Not in {root}: {', '.join(self.absent)}")
        for name, sets_found in self.found.items():
            for line in sets_found.lacks[:1]:
                more = (
                    f" (and {len(sets_found.lacks) - 1} more)" if len(sets_found.lacks) > 1 else ""
                )
                log(f"{name} is incomplete: {line}{more}")
        classes = {sets_found.class_names for sets_found in self.found.values()}
        rule = "has other classes than other sets, which need ImageNet's; pass data=imagenet_c"
        refuse("imagenet_c", {f"{rule} to evaluate it alone": len(classes) > 1})
        (self.class_names,) = classes
        if "imagenet_c" in self.found and self.image_size != PUBLISHED_SIDE:
            log(
                f"imagenet_c is evaluated as stored, resized to {self.image_size} where it has "
                "another size; published figures are for 224 pixels"
            )
        self.parts = self._all_parts()
        return {"val": self._dataset(self.parts[0])}

    def _all_parts(self) -> tuple[Part, ...]:
        """Return all parts to evaluate, in order; of incomplete datasets ImageNet-C alone."""
        parts: list[Part] = []
        for name, sets_found in self.found.items():
            if not sets_found.lacks or name == "imagenet_c":
                parts += sets_found.parts
        clean = self.found.get("imagenet")
        if clean is not None and not clean.lacks:
            # Clean images of the same 200 classes show how much A and R cost a network.
            pairs = [name for name in SUBSETS if name in self.found]
            parts += [restrict_to_subset(clean.parts[0], name) for name in pairs]
        lacks = [line for sets_found in self.found.values() for line in sets_found.lacks]
        remedy = "restore them, or pass data.published_counts=false for a stand-in"
        refuse("all sets", {f"are incomplete ({remedy})": [] if parts else lacks})
        return tuple(parts)

    def choose(self, part: Part) -> None:
        """Select the part of ``val_dataloader``, ``test_dataloader`` and previews."""
        self._datasets["val"] = self._dataset(part)

    def check_files(self, seconds: float = 60.0) -> None:
        """Raise an error, as these datasets are for evaluation only.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "these sets only evaluate: pass mode=test ckpt=<run folder or checkpoint file>"
        )

    def sizes(self) -> dict[str, int]:
        """Return the number of images per dataset."""
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
