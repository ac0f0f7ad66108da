"""Images in tar files, read in any order: ImageNet's archives, or WebDataset's shards."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn
from numpy.typing import NDArray

from datamodules.files import VALIDATION, decode_bytes, first_few, skipped_notice, to_rgb
from datamodules.files.class_order import ClassOrder, checked_order, in_order
from datamodules.files.console import say
from datamodules.files.text_files import nfc, read_lines
from datamodules.images.classification import ClassificationDataModule, Sample, sample
from datamodules.images.numbered_classes import refuse_unlisted, warn_of_absent
from datamodules.images.shares import checked_share, first_by_name, share_notice
from datamodules.images.synsets import as_synsets, synsets_of_files
from datamodules.images.tar_index import read
from datamodules.images.tar_shards import Shard, read_shard
from datamodules.images.transforms import Transform
from datamodules.loading.sampling import SeededDataset

SPLITS: Mapping[str, tuple[str, ...]] = {"train": ("train",), "val": VALIDATION}
NAMES = "classnames.txt"  # of WebDataset: the names of the classes, one a line
NUMBERED = re.compile(r"(.*[-_.])?(\d{4,})")  # how shards are called, as train-000017
SHARD = re.compile(
    r"(.*[-_.])?(train|val|valid|validation|test|shard|part|chunk|batch|data)s?[-_.]?\d+", re.I
)
COUNTED = re.compile(r"(.*[-_.])?(\d{2,})")
PACKED = re.compile(r"\.(tar\.(gz|bz2|xz|zst)|tgz|tbz2?|txz)$")
Labels = NDArray[np.int64]
NEITHER = (
    "tar files need <class>/*.jpg, or one tar file per class, or WebDataset's samples of .jpg and "
    ".cls (data.label_key=<field> reads .json)"
)


class ImageTarsDataModule(ClassificationDataModule):
    """Images in tar files: ``train/*.tar``, ``train.tar`` or ``train-*.tar``; ``val`` likewise.

    In WebDataset's layout the class of an image is the number in its ``.cls`` member; names of
    classes are the lines of ``classnames.txt``, else the numbers. Otherwise the class is the
    outermost folder in the tar file, or, where there is none, the name of the tar file: ImageNet's
    own training archive, one tar file per class within or beside the others, serves as it is. Then
    labels are the classes' places in the order of their names, as of class folders.

    Args:
        root: Folder that holds both.
        num_classes: Expected number of classes; None accepts any.
        class_order: As in ``ImageFolderDataModule``; of no use for WebDataset's numbers.
        train_share: Part of each class's training images that is used, the first by their names.
        label_key: Field of WebDataset's ``.json`` members that holds the label, ``a.b`` for the
            field ``b`` of the field ``a``; None for ``.cls``.
        **options: Of ``ClassificationDataModule``, such as ``image_size``.
    """

    layout = (
        "train/*.tar, train.tar or *train-*.tar, and the same of val, with <class>/*.jpg or "
        "WebDataset's .jpg and .cls in them"
    )
    example = "data=imagenet_tar data.root=/data/imagenet-tar"

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        num_classes: int | None = None,
        class_order: ClassOrder = "text",
        train_share: float = 1.0,
        label_key: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(root, **options)
        self.expected_classes = num_classes
        self.class_order = checked_order(class_order)
        self.train_share, self.label_key = checked_share(train_share), label_key

    def build(self) -> dict[Any, SeededDataset]:
        """List what is in the tar files."""
        shards = {split: self._shards(split) for split in SPLITS}
        both = {s.archive for s in shards["train"]} & {s.archive for s in shards["val"]}
        if both:
            raise ValueError(f"{min(both)} is named as training and as validation; rename it")
        every = [shard for found in shards.values() for shard in found]
        numbered = [shard for shard in every if shard.is_webdataset]
        if numbered and len(numbered) < len(every):
            odd = next(shard for shard in every if not shard.is_webdataset)
            raise ValueError(
                f"{self.folder} mixes two layouts: {odd.archive} lacks the labels that "
                f"{numbered[0].archive} has; {NEITHER}"
            )
        images = self._numbered(shards) if numbered else self._named(shards)
        if self.expected_classes not in (None, len(self.class_names)):
            raise ValueError(
                f"{self.folder} has {len(self.class_names)} classes but data.num_classes is "
                f"{self.expected_classes}; correct one of them"
            )
        if self.train_share < 1:
            train = images["train"]
            files = [name.rpartition("/")[2] for name in train.file_names()]
            say(share_notice(self.train_share, files))
            # Those of class folders are in the order of these already.
            by_name = files if numbered else None
            train.keep(first_by_name(by_name, train.labels, self.train_share))
        return {split: self.seeded(found, found.path) for split, found in images.items()}

    def _shards(self, split: str) -> list[Shard]:
        """Return the tar files of a split that hold images."""
        tars = find_tars(self.folder, SPLITS[split])
        found = [read_shard(path, self.label_key) for path in tars]
        skipped: Counter[str] = Counter()
        for shard in found:
            skipped.update(shard.skipped)
        for line in skipped_notice(tars[0].parent, skipped):
            say(line)
        if not any(shard.names for shard in found):
            raise ValueError(f"{self.folder}: no images in its tar files of {split}; {NEITHER}")
        return [shard for shard in found if shard.names]

    def _transform(self, split: str) -> Transform:
        made = self.augmentation.train if split == "train" else self.augmentation.eval
        return made(self.image_size)

    def _named(self, shards: Mapping[str, Sequence[Shard]]) -> dict[str, TarImages]:
        """Set the classes to the names of folders or tar files; return the images of each split."""
        paths = {"train": class_paths(shards["train"])}
        classes = {path.partition("/")[0] for path in paths["train"]}
        self.class_names = tuple(in_order(classes, self.class_order))
        paths["val"] = class_paths(shards["val"], self.class_names)
        label_of = {name: label for label, name in enumerate(self.class_names)}
        strays = {path.partition("/")[0] for path in paths["val"]} - classes
        if strays:
            raise ValueError(
                f"{self.folder}: tar files of val have classes that training lacks: "
                f"{first_few(sorted(strays))}"
            )
        fields = next((s.fields for found in shards.values() for s in found if s.fields), "")
        if fields:
            say(
                f"{self.folder}: the classes are folders, although images have .json members "
                f"({fields}); data.label_key=<field> takes the classes from there"
            )
        for split, found in paths.items():
            nested = [path for path in found if path.count("/") > 1]
            if nested:
                say(
                    f"{self.folder}, {split}: {len(nested)} images lie in sub-folders "
                    f"({first_few(nested, 2)}) and have the outermost folder's class; timm names "
                    "classes by the innermost folder"
                )
        made = {}
        for split, found in paths.items():
            labels = np.array([label_of[path.partition("/")[0]] for path in found], np.int64)
            made[split] = TarImages(shards[split], labels, self._transform(split))
            # In the order of class folders.
            made[split].keep(sorted(range(len(found)), key=lambda i: (labels[i], found[i])))
        return made

    def _numbered(self, shards: Mapping[str, Sequence[Shard]]) -> dict[str, TarImages]:
        """Set the classes of WebDataset's numbers; return the images of each split."""
        if self.class_order != "text":
            say(f"data.class_order={self.class_order} changes nothing: labels are in the tar files")
        self.class_order = None
        file = self.folder / NAMES
        given = read_names(file) if file.is_file() else None
        labels = {split: labels_of(found, given) for split, found in shards.items()}
        if given is None:
            refuse_unlisted(self.folder, labels, f"list all classes in {NAMES}, one a line")
        count = len(given) if given else int(labels["train"].max()) + 1
        first = dict(zip(labels["train"].tolist(), _names_of(shards["train"]), strict=True))
        numbers = tuple(map(str, range(count)))
        found = synsets_of_files(first, count)
        self.class_names = found or (as_synsets(given) if given else numbers)
        warn_of_absent(self.folder, labels, self.class_names)
        return {
            split: TarImages(shards[split], labels[split], self._transform(split))
            for split in shards
        }


class TarImages:
    """Images of tar files with labels.

    Args:
        shards: The tar files.
        labels: Of their images.
        transform: From RGB image to tensor.
    """

    def __init__(self, shards: Sequence[Shard], labels: Labels, transform: Transform) -> None:
        self.labels, self.transform = labels, transform
        self.archives = tuple(shard.archive for shard in shards)
        # Flat arrays: a million Python strings would be copied into each worker, page by page.
        self.names = np.array([os.fsencode(name) for name in _names_of(shards)])
        self.archive = np.repeat(np.arange(len(shards)), [len(shard.names) for shard in shards])
        self.places = np.array(
            [pair for s in shards for pair in zip(s.offsets, s.sizes, strict=True)], np.int64
        )

    def keep(self, indices: Sequence[int] | Labels) -> None:
        """Keep these images, in this order."""
        self.labels, self.names = self.labels[indices], self.names[indices]
        self.archive, self.places = self.archive[indices], self.places[indices]

    def __len__(self) -> int:
        """Number of images."""
        return len(self.labels)

    def file_names(self) -> list[str]:
        """The names of the images in the tar files."""
        return [os.fsdecode(name) for name in self.names]

    def path(self, index: int) -> str:
        """The tar file of a sample and its place there."""
        return f"{self.archives[self.archive[index]]}/{os.fsdecode(self.names[index])}"

    def __getitem__(self, index: int, /) -> Sample:
        """Get ``image`` (3, H, W), ``label`` and ``sample_id``."""
        offset, size = self.places[index].tolist()
        content, name = read(self.archives[self.archive[index]], offset, size), self.path(index)
        image = to_rgb(decode_bytes(content, name), name)
        return sample(self.transform(image), int(self.labels[index]), index)


def find_tars(root: Path, names: Sequence[str]) -> list[Path]:
    """Return the tar files of a split, in the order of their names.

    Args:
        root: Holds ``<name>/*.tar``, ``<name>.tar`` or ``*<name>-*.tar``.
        names: What the split may be called.

    Raises:
        FileNotFoundError: There are none.
        ValueError: The root has several names of the split, or some of its files are compressed.
    """
    found: dict[str, list[Path]] = {}
    for name in names:
        flat = [path for path in _tars_in(root) if name in re.split(r"[-_.]", path.stem)]
        here = _tars_in(root / name) or flat
        if len(here) > 1 and root / f"{name}.tar" in here:
            raise ValueError(
                f"{root} has {name}.tar and further tar files of {name} ({here[0].name}); keep one"
            )
        if here:
            found[name] = here
    if len(found) > 1:
        raise ValueError(
            f"{root} has tar files of {' and of '.join(found)}, both validation images; keep one"
        )
    packed = [path for name in names for path in _compressed(root, name)]
    if not found:
        what = f", only compressed ones ({first_few(packed, 2)}): unpack them to plain .tar files"
        raise FileNotFoundError(
            f"{root} has no tar files of {names[0]}{what if packed else ''}; it needs "
            f"{ImageTarsDataModule.layout}"
        )
    (tars,) = found.values()
    beside = [name for name in packed if (root / name).parent == tars[0].parent]
    if beside:
        raise ValueError(
            f"{root} has plain and compressed tar files of {names[0]} ({first_few(beside, 2)}); "
            "unpack these to plain .tar files"
        )
    _warn_of_gaps(tars)
    return tars


def _tars_in(folder: Path) -> list[Path]:
    """Return the tar files of a folder in the order of their names."""
    return sorted(path for path in folder.glob("*") if path.suffix.lower() == ".tar")


def _compressed(root: Path, name: str) -> list[str]:
    """Return the paths of a split's compressed tar files."""
    flat = [path for path in root.glob("*") if name in re.split(r"[-_.]", path.name)]
    here = [*(root / name).glob("*"), *flat]
    return sorted(
        path.relative_to(root).as_posix() for path in here if PACKED.search(path.name.lower())
    )


def _warn_of_gaps(tars: Sequence[Path]) -> None:
    """Warn of numbered shards some of which are missing."""
    numbered = [match for path in tars if (match := NUMBERED.fullmatch(path.stem))]
    if len(numbered) < len(tars) or len({match[1] for match in numbered}) > 1:
        return
    numbers = {int(match[2]) for match in numbered}
    missing = sorted(set(range(min(numbers), max(numbers))) - numbers)
    if missing:
        first, width = numbered[0], len(numbered[0][2])
        named = [f"{first[1] or ''}{number:0{width}d}.tar" for number in missing]
        rank_zero_warn(f"{tars[0].parent} lacks shards between others: {first_few(named)}")


def class_paths(shards: Sequence[Shard], known: Sequence[str] = ()) -> list[str]:
    """Return each image as ``<class>/<file>``, as it would lie in class folders.

    A folder around all class folders is left out.

    Args:
        shards: Without labels.
        known: Classes, which no such folder can be.

    Raises:
        ValueError: An image has neither a folder nor a tar file that could be its class.
    """
    parts = [nfc(name).split("/") for name in _names_of(shards)]
    while all(len(one) > 2 for one in parts) and len({one[0] for one in parts}) == 1:
        if parts[0][0] in known:
            break
        parts = [one[1:] for one in parts]
    archives = [Path(shard.archive) for shard in shards for _ in shard.names]
    flat = {path for path, one in zip(archives, parts, strict=True) if len(one) == 1}
    stems = {nfc(path.stem) for path in flat}
    inside = {_class(one[0]) for one in parts if len(one) > 1}
    if flat:
        _refuse_unlabelled(flat, stems, inside, shards)
    return [
        "/".join([_class(one[0]), *one[1:]] if len(one) > 1 else [nfc(path.stem), *one])
        for path, one in zip(archives, parts, strict=True)
    ]


def _class(folder: str) -> str:
    """Return the class of a folder, or of a tar file in a tar file."""
    return folder[:-4] if folder.lower().endswith(".tar") else folder


def _refuse_unlabelled(
    flat: set[Path], stems: set[str], inside: set[str], shards: Sequence[Shard]
) -> None:
    """Raise an error unless tar files of images without folders are one per class."""
    first = min(flat)
    fields = next((shard.fields for shard in shards if shard.fields), "")
    if fields:
        raise ValueError(
            f"{first} has images with .json members; name the field that holds the label, "
            f"data.label_key=...; it has: {fields}"
        )
    splits = {name for names in SPLITS.values() for name in names}
    if _are_shards(stems) or stems & splits or (inside and not stems <= inside):
        raise ValueError(f"{first} has images without a class; {NEITHER}")
    say(f"The classes are the names of the tar files in {first.parent}: {first_few(sorted(stems))}")


def _are_shards(stems: set[str]) -> bool:
    """Return True for tar files that are counted and not named by classes."""
    if all(NUMBERED.fullmatch(stem) or SHARD.fullmatch(stem) for stem in stems):
        return True
    counted = [match for stem in stems if (match := COUNTED.fullmatch(stem))]
    padded = len({(match[1], len(match[2])) for match in counted}) == 1
    return len(counted) == len(stems) and padded and min(int(match[2]) for match in counted) == 0


def labels_of(shards: Sequence[Shard], names: Sequence[str] | None) -> Labels:
    """Return the labels of WebDataset's samples.

    Args:
        shards: With labels, numbers or names.
        names: Of the classes; None if the numbers are the names.

    Raises:
        ValueError: A label is not one of the classes.
    """
    places = {name: label for label, name in enumerate(names or ())}
    count = len(names) if names else np.iinfo(np.int32).max
    labels = []
    for shard in shards:
        for name, label in zip(shard.names, shard.labels, strict=True):
            number = _number(label, places)
            if number is None or not 0 <= number < count:
                expected = (
                    f"{NAMES} lists {count} classes, from 0 to {count - 1}"
                    if names
                    else f"without {NAMES} labels are numbers from 0 on"
                )
                raise ValueError(f"{shard.archive}/{name} has the label {label!r}; {expected}")
            labels.append(number)
    return np.array(labels, np.int64)


def _number(label: int | str, places: Mapping[str, int]) -> int | None:
    if isinstance(label, int):
        return label
    whole = re.fullmatch(r"([+-]?\d+)(\.0*)?", label, re.ASCII)
    return places.get(nfc(label), int(whole[1]) if whole else None)


def read_names(file: Path) -> list[str]:
    """Return the lines of a list of classes.

    Raises:
        ValueError: A line is empty, or two are equal.
    """
    names = read_lines(file)
    wrong = [f"line {i + 1}" for i, name in enumerate(names) if not name]
    wrong += [name for name, count in Counter(names).items() if name and count > 1]
    if wrong or not names:
        raise ValueError(
            f"{file} must have one name per class and line, all different: "
            f"{first_few(wrong) or 'it is empty'}"
        )
    return names


def _names_of(shards: Sequence[Shard]) -> list[str]:
    return [name for shard in shards for name in shard.names]
