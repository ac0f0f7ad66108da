"""The published sets on disk: their parts, their classes, and what is missing."""

from __future__ import annotations

import hashlib
import os
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from datamodules.corruptions import KINDS, SEVERITIES
from datamodules.files import first_few, list_folders, validation_folder
from datamodules.files.class_listing import Listing, composed_names, list_classes
from datamodules.files.class_order import ClassOrder, in_order
from datamodules.images.synsets import SYNSETS

# What folders of the sets are called, below a folder that holds several.
USUAL: Mapping[str, tuple[str, ...]] = {
    "imagenet": ("imagenet", "imagenet-1k", "ILSVRC2012", "imagenet1k"),
    "imagenet_c": ("imagenet-c", "ImageNet-C", "imagenet_c"),
    "imagenet_a": ("imagenet-a", "ImageNet-A", "imagenet_a"),
    "imagenet_r": ("imagenet-r", "ImageNet-R", "imagenet_r"),
    "imagenet_sketch": ("sketch", "imagenet-sketch", "ImageNet-Sketch", "imagenet_sketch"),
    "imagenet_v2": ("imagenetv2-matched-frequency-format-val", "imagenetv2", "imagenet-v2"),
}
# Images of each part, as published.
IMAGES: Mapping[str, int] = {
    "imagenet": 50_000,
    "imagenet_c": 50_000,
    "imagenet_a": 7_500,
    "imagenet_r": 30_000,
    "imagenet_sketch": 50_889,
    "imagenet_v2": 10_000,
}
GROUPS = ("noise", "blur", "weather", "digital")  # folders that the archives of -C unpack to
SUBSETS = ("imagenet_a", "imagenet_r")  # of 200 classes each


@dataclass(frozen=True)
class Part:
    """Images that are evaluated together.

    Attributes:
        name: Its set, and within ImageNet-C kind and severity: ``imagenet_c/fog/3``.
        folder: That the files' names are relative to.
        files: Names.
        labels: Their classes.
        columns: The classes that predictions are chosen among; all if empty.
    """

    name: str
    folder: Path
    files: tuple[str, ...]
    labels: tuple[int, ...]
    columns: tuple[int, ...] = ()

    @property
    def fingerprint(self) -> str:
        """What tells its list of images from another one."""
        words = [os.fsencode(f"{n} {k}") for n, k in zip(self.files, self.labels, strict=True)]
        return hashlib.sha256(b"\n".join([*words, str(self.columns).encode()])).hexdigest()[:16]


@dataclass(frozen=True)
class Found:
    """A set on disk.

    Attributes:
        parts: What there is of it.
        lacks: What is missing or is too much, in words; without anything it is whole.
        class_names: The classes that labels count.
    """

    parts: tuple[Part, ...] = ()
    lacks: tuple[str, ...] = ()
    class_names: tuple[str, ...] = field(default=SYNSETS, repr=False)


def subset_of(name: str) -> tuple[int, ...]:
    """The 200 classes of "imagenet_a" or "imagenet_r", ascending.

    Source: the authors' lists (natural-adv-examples, imagenet-r) as timm has them.
    """
    text = pkgutil.get_data("timm.data", f"_info/{name}_indices.txt")
    assert text is not None
    return tuple(sorted(int(line) for line in text.decode().split()))


def locate(name: str, root: Path | None, given: str | None, *, alone: bool) -> Path | None:
    """The folder of a set; None if it is not there.

    Args:
        name: Of the set.
        root: The folder of the set if it is looked for alone, or one that holds several.
        given: The set's own folder, which goes before ``root``.
        alone: Whether ``root`` may be the set itself.

    Raises:
        FileNotFoundError: ``given`` does not exist.
    """
    if given is not None:
        folder = Path(given).expanduser()
        if not folder.is_dir():
            raise FileNotFoundError(f"data.roots.{name}={given} is no folder")
        return folder
    if root is None:
        return None
    for usual in USUAL[name]:
        if (root / usual).is_dir():
            return root / usual
    return root if alone else None


def find(
    name: str, folder: Path, *, published: bool = True, class_order: ClassOrder | None = "text"
) -> Found:
    """A set in its folder.

    Args:
        name: Of the set.
        folder: That holds it.
        published: Whether the number of images has to be the published one.
        class_order: Of the classes of a copy in ImageNet-C's layout that are not ImageNet's.

    Raises:
        ValueError: Folders that are none of the set's.
    """
    if name == "imagenet_c":
        return _c(folder, published, class_order)
    if name == "imagenet_v2":
        return _v2(folder, published)
    return _of_synsets(name, folder, published)


def _of_synsets(name: str, folder: Path, published: bool) -> Found:
    """A set of folders that are called by WordNet's numbers: of all 1000 classes, or of 200."""
    masked = name in SUBSETS
    classes = subset_of(name) if masked else tuple(range(len(SYNSETS)))
    folder = _inner(name, folder)
    wanted = {SYNSETS[label]: label for label in classes}
    found = list_folders(folder)
    foreign = [one for one in found if one not in wanted]
    if foreign:
        raise ValueError(
            f"{folder} has folders that are none of the {len(wanted)} classes of {name}: "
            f"{first_few(foreign)}; pass the folder that holds the class folders alone"
        )
    images = list_classes(folder, found)
    part = _part(name, folder, images, wanted, classes if masked else ())
    missing = [one for one in wanted if not images.get(one)]
    return Found((part,), _lacks(part, missing, published))


def _inner(name: str, folder: Path) -> Path:
    """Return the folder that holds a set's class folders: one inside, or the set's own."""
    inside = {"imagenet": validation_folder(folder), "imagenet_sketch": folder / "sketch"}
    inner = inside.get(name, folder / name)
    return inner if inner.is_dir() else folder


def _v2(folder: Path, published: bool) -> Found:
    found = list_folders(folder)
    foreign = [one for one in found if not (one.isdecimal() and int(one) < len(SYNSETS))]
    if foreign:
        raise ValueError(
            f"{folder} has folders that are none of ImageNetV2's, which are called 0 to 999: "
            f"{first_few(foreign)}; pass one of its three sets"
        )
    # By number: as text, 10 would stand before 2.
    images = list_classes(folder, sorted(found, key=int))
    part = _part("imagenet_v2", folder, images, {one: int(one) for one in found})
    held = {int(one) for one in found if images[one]}
    missing = [str(label) for label in range(len(SYNSETS)) if label not in held]
    return Found((part,), _lacks(part, missing, published))


def _lacks(part: Part, missing: list[str], published: bool) -> tuple[str, ...]:
    lacks = [f"no images of {len(missing)} classes: {first_few(missing)}"] if missing else []
    return (*lacks, *(_count(part, IMAGES[part.name]) if published else ()))


def _c(folder: Path, published: bool, class_order: ClassOrder | None) -> Found:
    """ImageNet-C, or a copy of any class folder in its layout."""
    there = {
        (kind, severity): place
        for kind in KINDS
        for severity in SEVERITIES
        if (place := _place(folder, kind, severity)) is not None
    }
    if not there:
        raise ValueError(
            f"{folder} holds no <kind>/<severity>/<class>/ such as {KINDS[0]}/1/; pass the folder "
            "of ImageNet-C, or make a copy of your own data with tools/corrupt.py"
        )
    listing = Listing(folder)
    images = {
        key: listing.images(place, composed_names(place, list_folders(place)))
        for key, place in there.items()
    }
    listing.say()
    classes = {one for held in images.values() for one in held}
    names = SYNSETS if classes <= set(SYNSETS) else tuple(in_order(classes, class_order))
    labels = {one: label for label, one in enumerate(names)}
    parts = [
        _part(f"imagenet_c/{kind}/{severity}", there[kind, severity], held, labels)
        for (kind, severity), held in images.items()
    ]
    lacks = []
    missing = [f"imagenet_c/{k}/{s}" for k in KINDS for s in SEVERITIES if (k, s) not in there]
    if missing:
        lacks.append(f"no {first_few(missing)}")
    # Of other classes, and of a stand-in, all parts have as many as the largest.
    largest = max(len(part.files) for part in parts)
    usual = IMAGES["imagenet_c"] if names is SYNSETS and published else largest
    lacks += [line for part in parts for line in _count(part, usual)]
    return Found(tuple(parts), tuple(lacks), names)


def _place(folder: Path, kind: str, severity: int) -> Path | None:
    for inner in (folder, *(folder / group for group in GROUPS)):
        place = inner / kind / str(severity)
        if place.is_dir():
            return place
    return None


def _part(
    name: str,
    folder: Path,
    images: Mapping[str, list[str]],
    labels: Mapping[str, int],
    columns: tuple[int, ...] = (),
) -> Part:
    files = [image for held in images.values() for image in held]
    if not files:
        raise ValueError(f"{folder} holds no images in class folders; unpack {name} again")
    numbers = [labels[one] for one, held in images.items() for _ in held]
    return Part(name, folder, tuple(files), tuple(numbers), columns)


def _count(part: Part, expected: int) -> tuple[str, ...]:
    if len(part.files) == expected:
        return ()
    return (f"{part.name} has {len(part.files):,} images instead of {expected:,}",)


def on_subset(clean: Part, name: str) -> Part:
    """ImageNet's own images of the 200 classes of ImageNet-A or -R, chosen among these.

    Args:
        clean: ImageNet's validation images.
        name: "imagenet_a" or "imagenet_r".
    """
    columns = subset_of(name)
    labels = np.array(clean.labels)
    kept = np.flatnonzero(np.isin(labels, columns)).tolist()
    return Part(
        f"imagenet/{name}",
        clean.folder,
        tuple(clean.files[i] for i in kept),
        tuple(clean.labels[i] for i in kept),
        columns,
    )
