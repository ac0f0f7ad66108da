"""The published robustness datasets on disk: parts, classes and missing images."""

from __future__ import annotations

import hashlib
import os
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from datamodules.corruptions import KINDS, SEVERITIES
from datamodules.files.class_listing import ClassListing, list_class_images, nfc_names
from datamodules.files.class_order import ClassOrder, sort_classes
from datamodules.files.folders import first_few, list_folders, validation_folder
from datamodules.files.values import refuse
from datamodules.images.synsets import SYNSETS

# Usual names of the datasets' folders, below a folder that holds several.
USUAL: Mapping[str, tuple[str, ...]] = {
    "imagenet": ("imagenet", "imagenet-1k", "ILSVRC2012", "imagenet1k"),
    "imagenet_c": ("imagenet-c", "ImageNet-C", "imagenet_c"),
    "imagenet_a": ("imagenet-a", "ImageNet-A", "imagenet_a"),
    "imagenet_r": ("imagenet-r", "ImageNet-R", "imagenet_r"),
    "imagenet_sketch": ("sketch", "imagenet-sketch", "ImageNet-Sketch", "imagenet_sketch"),
    "imagenet_v2": ("imagenetv2-matched-frequency-format-val", "imagenetv2", "imagenet-v2"),
}
# Images per part, as published.
IMAGES: Mapping[str, int] = {
    "imagenet": 50_000,
    "imagenet_c": 50_000,
    "imagenet_a": 7_500,
    "imagenet_r": 30_000,
    "imagenet_sketch": 50_889,
    "imagenet_v2": 10_000,
}
GROUPS = ("noise", "blur", "weather", "digital")  # folders in the archives of ImageNet-C
SUBSETS = ("imagenet_a", "imagenet_r")  # 200 classes each


@dataclass(frozen=True)
class Part:
    """Images that are evaluated together.

    Attributes:
        name: Name of the dataset; for ImageNet-C with kind and severity: ``imagenet_c/fog/3``.
        folder: Folder that the file names are relative to.
        files: File names.
        labels: Label per file.
        columns: Classes that predictions are chosen from; empty means all.
    """

    name: str
    folder: Path
    files: tuple[str, ...]
    labels: tuple[int, ...]
    columns: tuple[int, ...] = ()

    @property
    def fingerprint(self) -> str:
        """Hash of the files, labels and classes."""
        words = [os.fsencode(f"{n} {k}") for n, k in zip(self.files, self.labels, strict=True)]
        return hashlib.sha256(b"\n".join([*words, str(self.columns).encode()])).hexdigest()[:16]


@dataclass(frozen=True)
class FoundSet:
    """A dataset on disk.

    Attributes:
        parts: Parts that exist.
        lacks: Missing or surplus images, as text; empty if the dataset is complete.
        class_names: Classes that the labels number.
    """

    parts: tuple[Part, ...] = ()
    lacks: tuple[str, ...] = ()
    class_names: tuple[str, ...] = field(default=SYNSETS, repr=False)


def subset_classes(name: str) -> tuple[int, ...]:
    """Return the 200 classes of "imagenet_a" or "imagenet_r", ascending.

    Source: the authors' lists (natural-adv-examples, imagenet-r) as included in timm.
    """
    text = pkgutil.get_data("timm.data", f"_info/{name}_indices.txt")
    assert text is not None
    return tuple(sorted(int(line) for line in text.decode().split()))


def locate_set(
    name: str, root: Path | None, set_folder: str | None, *, may_be_root: bool
) -> Path | None:
    """Return the folder of a dataset; None if it does not exist.

    Args:
        name: Name of the dataset.
        root: Folder of the dataset if ``may_be_root``, or one that holds several.
        set_folder: The dataset's own folder, which overrides ``root``.
        may_be_root: True if ``root`` may be the dataset itself.

    Raises:
        FileNotFoundError: ``set_folder`` does not exist.
    """
    if set_folder is not None:
        folder = Path(set_folder).expanduser()
        if not folder.is_dir():
            raise FileNotFoundError(
                f"data.roots.{name}={set_folder} is not a folder; correct the path"
            )
        return folder
    if root is None:
        return None
    for usual in USUAL[name]:
        if (root / usual).is_dir():
            return root / usual
    return root if may_be_root else None


def find_set(
    name: str, folder: Path, *, published: bool = True, class_order: ClassOrder | None = "text"
) -> FoundSet:
    """Read a dataset's folder.

    Args:
        name: Name of the dataset.
        folder: Its folder.
        published: Require the published number of images.
        class_order: Order of the classes in a copy of other data in ImageNet-C's layout.

    Raises:
        ValueError: A folder is not one of the dataset's classes.
    """
    if name == "imagenet_c":
        return _read_imagenet_c(folder, published, class_order)
    if name == "imagenet_v2":
        return _read_imagenet_v2(folder, published)
    return _read_synsets(name, folder, published)


def _read_synsets(name: str, folder: Path, published: bool) -> FoundSet:
    """Read a dataset of synset folders: all 1000 classes, or 200 of them."""
    masked = name in SUBSETS
    classes = subset_classes(name) if masked else tuple(range(len(SYNSETS)))
    folder = _inner(name, folder)
    label_of = {SYNSETS[label]: label for label in classes}
    folders = list_folders(folder)
    foreign = [synset for synset in folders if synset not in label_of]
    rule = f"has folders that are not among the {len(label_of)} classes of {name}"
    refuse(folder, {f"{rule} (pass the folder that holds only the class folders)": foreign})
    images = list_class_images(folder, folders)
    part = _part(name, folder, images, label_of, classes if masked else ())
    missing = [synset for synset in label_of if not images.get(synset)]
    return FoundSet((part,), _lacks(part, missing, published))


def _inner(name: str, folder: Path) -> Path:
    """Return the folder of a dataset's class folders: one inside, or the dataset's own."""
    inside = {"imagenet": validation_folder(folder), "imagenet_sketch": folder / "sketch"}
    inner = inside.get(name, folder / name)
    return inner if inner.is_dir() else folder


def _read_imagenet_v2(folder: Path, published: bool) -> FoundSet:
    folders = list_folders(folder)
    foreign = [name for name in folders if not (name.isdecimal() and int(name) < len(SYNSETS))]
    rule = "has folders other than ImageNetV2's 0 to 999 (pass one of its three sets)"
    refuse(folder, {rule: foreign})
    # By number: sorted as text, 10 would come before 2.
    images = list_class_images(folder, sorted(folders, key=int))
    part = _part("imagenet_v2", folder, images, {name: int(name) for name in folders})
    files = {int(name) for name in folders if images[name]}
    missing = [str(label) for label in range(len(SYNSETS)) if label not in files]
    return FoundSet((part,), _lacks(part, missing, published))


def _lacks(part: Part, missing: list[str], published: bool) -> tuple[str, ...]:
    lacks = [f"no images of {len(missing)} classes: {first_few(missing)}"] if missing else []
    return (*lacks, *(_count(part, IMAGES[part.name]) if published else ()))


def _read_imagenet_c(folder: Path, published: bool, class_order: ClassOrder | None) -> FoundSet:
    """Read ImageNet-C, or a copy of any class folders in its layout."""
    places = {
        (kind, severity): place
        for kind in KINDS
        for severity in SEVERITIES
        if (place := _place(folder, kind, severity)) is not None
    }
    rule = (
        f"lacks <kind>/<severity>/<class>/ such as {KINDS[0]}/1/; pass ImageNet-C's folder, or "
        "make a copy of your own data with tools/corrupt.py"
    )
    refuse(folder, {rule: not places})
    listing = ClassListing(folder)
    images = {
        key: listing.images(place, nfc_names(place, list_folders(place)))
        for key, place in places.items()
    }
    listing.log()
    classes = {name for files in images.values() for name in files}
    names = SYNSETS if classes <= set(SYNSETS) else tuple(sort_classes(classes, class_order))
    labels = {name: label for label, name in enumerate(names)}
    parts = [
        _part(f"imagenet_c/{kind}/{severity}", places[kind, severity], files, labels)
        for (kind, severity), files in images.items()
    ]
    lacks = []
    missing = [f"imagenet_c/{k}/{s}" for k in KINDS for s in SEVERITIES if (k, s) not in places]
    if missing:
        lacks.append(f"no {first_few(missing)}")
    # In other data and stand-ins, every part must be as large as the largest.
    largest = max(len(part.files) for part in parts)
    usual = IMAGES["imagenet_c"] if names is SYNSETS and published else largest
    lacks += [line for part in parts for line in _count(part, usual)]
    return FoundSet(tuple(parts), tuple(lacks), names)


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
    files = [image for images_of in images.values() for image in images_of]
    refuse(folder, {f"must hold images in class folders; unpack {name} again": not files})
    numbers = [labels[synset] for synset, images_of in images.items() for _ in images_of]
    return Part(name, folder, tuple(files), tuple(numbers), columns)


def _count(part: Part, expected: int) -> tuple[str, ...]:
    if len(part.files) == expected:
        return ()
    return (f"{part.name} has {len(part.files):,} images instead of {expected:,}",)


def restrict_to_subset(clean: Part, name: str) -> Part:
    """Return ImageNet's images of the 200 classes of ImageNet-A or -R, as a part.

    Args:
        clean: ImageNet's validation images.
        name: "imagenet_a" or "imagenet_r".
    """
    columns = subset_classes(name)
    labels = np.array(clean.labels)
    places_kept = np.flatnonzero(np.isin(labels, columns)).tolist()
    return Part(
        f"imagenet/{name}",
        clean.folder,
        tuple(clean.files[i] for i in places_kept),
        tuple(clean.labels[i] for i in places_kept),
        columns,
    )
