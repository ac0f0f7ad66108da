"""Images in tar files with random access: ImageNet's archives, or WebDataset's shards.

timm's reader of tars takes class folders alone and writes an index as a pickle beside the data.
"""

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

from datamodules.files.class_order import ClassOrder, sort_classes
from datamodules.files.console import log
from datamodules.files.decoding import decode_bytes, to_rgb
from datamodules.files.folders import VALIDATION, first_few, skipped_notice
from datamodules.files.text_files import nfc, read_lines
from datamodules.files.values import refuse
from datamodules.images.classification import ClassificationDataModule, Sample, make_sample
from datamodules.images.numbered_classes import check_listed, warn_of_absent
from datamodules.images.shares import check_share, first_by_name, share_notice
from datamodules.images.synsets import synsets_of_files, to_synsets
from datamodules.images.tar_index import read_member
from datamodules.images.tar_shards import Shard, read_shard
from datamodules.images.transforms import Transform
from datamodules.loading.sampling import SeededDataset

SPLITS: Mapping[str, tuple[str, ...]] = {"train": ("train",), "val": VALIDATION}
NAMES = "classnames.txt"  # WebDataset's class names, one per line
NUMBERED = re.compile(r"(.*[-_.])?(\d{4,})")  # names of shards, such as train-000017
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
    """Images in tar files, with classes from folders, tar files or WebDataset's labels.

    Layout: ``train/*.tar``, ``train.tar`` or ``train-*.tar``, and the same for ``val``. See
    https://github.com/webdataset/webdataset and https://www.image-net.org/download.php.

    In WebDataset's layout the class is the number in an image's ``.cls`` member; class names are
    the lines of ``classnames.txt``, or else the numbers. Otherwise the class is the outermost
    folder in the tar file, or else the name of the tar file. ImageNet's own training archive works
    as it is: one tar file per class, within one archive or side by side. Labels then follow the
    sorted class names, as for class folders.

    Args:
        root: Folder that holds both splits.
        num_classes: Expected number of classes; None accepts any.
        class_order: As in ``ImageFolderDataModule``; ignored for WebDataset's numbers.
        train_share: Share of each class's training images to use, the first by name.
        label_key: Field of WebDataset's ``.json`` members with the label, ``a.b`` for the field
            ``b`` of the field ``a``; None for ``.cls``.
        **options: Options of ``ClassificationDataModule``, such as ``image_size``.
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
        self.class_order = class_order
        self.train_share, self.label_key = check_share(train_share), label_key

    def build(self) -> dict[Any, SeededDataset]:
        """List the images in the tar files and their classes."""
        shards = {split: self._shards(split) for split in SPLITS}
        shared = {s.archive for s in shards["train"]} & {s.archive for s in shards["val"]}
        every = [shard for read in shards.values() for shard in read]
        numbered = [shard for shard in every if shard.is_webdataset]
        faults = {
            "has tar files that are named for training and validation (rename them)": sorted(
                shared
            ),
            f"mixes two layouts ({NEITHER}); without labels": sorted(
                {shard.archive for shard in every if numbered and not shard.is_webdataset}
            ),
        }
        refuse(self.folder, faults)
        images = self._by_number(shards) if numbered else self._by_folder(shards)
        self.check_count(self.folder)
        if self.train_share < 1:
            train = images["train"]
            files = [name.rpartition("/")[2] for name in train.file_names()]
            log(share_notice(self.train_share, files))
            # Images of class folders are sorted by name already.
            by_name = files if numbered else None
            train.keep(first_by_name(by_name, train.labels, self.train_share))
        return {split: self.seeded(read, read.path) for split, read in images.items()}

    def _shards(self, split: str) -> list[Shard]:
        """Return the tar files of a split that hold images."""
        tars = find_tars(self.folder, SPLITS[split])
        members_of = [read_shard(path, self.label_key) for path in tars]
        skipped: Counter[str] = Counter()
        for shard in members_of:
            skipped.update(shard.skipped)
        for line in skipped_notice(tars[0].parent, skipped):
            log(line)
        images = any(shard.names for shard in members_of)
        refuse(self.folder, {f"has tar files of {split} that lack images; {NEITHER}": not images})
        return [shard for shard in members_of if shard.names]

    def _transform(self, split: str) -> Transform:
        images_of = self.augmentation.train if split == "train" else self.augmentation.eval
        return images_of(self.image_size)

    def _by_folder(self, shards: Mapping[str, Sequence[Shard]]) -> dict[str, TarImages]:
        """Set the classes from folders or tar files; return the images of each split."""
        paths = {"train": class_paths(shards["train"])}
        classes = {path.partition("/")[0] for path in paths["train"]}
        self.class_names = tuple(sort_classes(classes, self.class_order))
        paths["val"] = class_paths(shards["val"], self.class_names)
        label_of = {name: label for label, name in enumerate(self.class_names)}
        strays = {path.partition("/")[0] for path in paths["val"]} - classes
        rule = "has tar files of val with classes that training lacks"
        refuse(self.folder, {rule: sorted(strays)})
        fields = next((s.fields for members in shards.values() for s in members if s.fields), "")
        if fields:
            log(
                f"{self.folder}: folders are the classes, although images have .json members "
                f"({fields}); pass data.label_key=<field> to use those"
            )
        for split, members in paths.items():
            nested = [path for path in members if path.count("/") > 1]
            if nested:
                log(
                    f"{self.folder}, {split}: {len(nested)} images lie in sub-folders "
                    f"({first_few(nested, 2)}) and are labelled by the outermost folder; timm "
                    "labels by the innermost folder"
                )
        images_of = {}
        for split, members in paths.items():
            labels = np.array([label_of[path.partition("/")[0]] for path in members], np.int64)
            images_of[split] = TarImages(shards[split], labels, self._transform(split))
            # Sort as class folders are sorted.
            images_of[split].keep(
                sorted(range(len(members)), key=lambda i: (labels[i], members[i]))
            )
        return images_of

    def _by_number(self, shards: Mapping[str, Sequence[Shard]]) -> dict[str, TarImages]:
        """Set the classes from WebDataset's labels; return the images of each split."""
        if self.class_order != "text":
            log(f"data.class_order={self.class_order} is ignored: the tar files number the classes")
        self.class_order = None
        file = self.folder / NAMES
        names = read_names(file) if file.is_file() else None
        labels = {split: read_labels(members_of, names) for split, members_of in shards.items()}
        if names is None:
            check_listed(self.folder, labels, f"list all classes in {NAMES}, one per line")
        count = len(names) if names else int(labels["train"].max()) + 1
        first = dict(zip(labels["train"].tolist(), _names_of(shards["train"]), strict=True))
        numbers = tuple(map(str, range(count)))
        members_of = synsets_of_files(first, count)
        self.class_names = members_of or (to_synsets(names) if names else numbers)
        warn_of_absent(self.folder, labels, self.class_names)
        return {
            split: TarImages(shards[split], labels[split], self._transform(split))
            for split in shards
        }


class TarImages:
    """Dataset of images in tar files.

    Args:
        shards: The tar files.
        labels: Label per image.
        transform: Turns an RGB image into a tensor.
    """

    def __init__(self, shards: Sequence[Shard], labels: Labels, transform: Transform) -> None:
        self.labels, self.transform = labels, transform
        self.archives = tuple(shard.archive for shard in shards)
        # Flat arrays: each worker would copy a million Python strings page by page.
        self.names = np.array([os.fsencode(name) for name in _names_of(shards)])
        self.archive = np.repeat(np.arange(len(shards)), [len(shard.names) for shard in shards])
        self.places = np.array(
            [pair for s in shards for pair in zip(s.offsets, s.sizes, strict=True)], np.int64
        )

    def keep(self, indices: Sequence[int] | Labels) -> None:
        """Keep only these images, in this order."""
        self.labels, self.names = self.labels[indices], self.names[indices]
        self.archive, self.places = self.archive[indices], self.places[indices]

    def __len__(self) -> int:
        return len(self.labels)

    def file_names(self) -> list[str]:
        """Return the names of the images in the tar files."""
        return [os.fsdecode(name) for name in self.names]

    def path(self, index: int) -> str:
        """Return the tar file of a sample and its path inside."""
        return f"{self.archives[self.archive[index]]}/{os.fsdecode(self.names[index])}"

    def __getitem__(self, index: int, /) -> Sample:
        """Return ``image`` (3, H, W), ``label`` and ``sample_id``."""
        offset, size = self.places[index].tolist()
        archive, name = self.archives[self.archive[index]], self.path(index)
        content = read_member(archive, offset, size)
        image = to_rgb(decode_bytes(content, name), name)
        return make_sample(self.transform(image), int(self.labels[index]), index)


def find_tars(root: Path, names: Sequence[str]) -> list[Path]:
    """Return the tar files of a split, sorted by name.

    Args:
        root: Folder that holds ``<name>/*.tar``, ``<name>.tar`` or ``*<name>-*.tar``.
        names: Possible names of the split.

    Raises:
        FileNotFoundError: The split's tar files are missing.
        ValueError: The split exists under several names, or some of its files are compressed.
    """
    splits: dict[str, list[Path]] = {}
    beside = []
    for name in names:
        flat = [path for path in _tars_in(root) if name in re.split(r"[-_.]", path.stem)]
        tars = _tars_in(root / name) or flat
        if len(tars) > 1 and root / f"{name}.tar" in tars:
            beside = [path.name for path in tars]
        if tars:
            splits[name] = tars
    packed = [path for name in names for path in _compressed(root, name)]
    if not splits:
        compressed = f" and has compressed ones ({first_few(packed, 2)}): unpack them to .tar files"
        raise FileNotFoundError(
            f"{root} lacks plain tar files of {names[0]}{compressed if packed else ''}; it needs "
            f"{ImageTarsDataModule.layout}"
        )
    tars = next(iter(splits.values()))
    remedy = "unpack the latter to plain .tar files"
    faults = {
        "has one tar file of a split and others of the same split (keep one)": beside,
        "has tar files of several names, all for validation (keep one)": (
            [*splits] if len(splits) > 1 else []
        ),
        f"has plain and compressed tar files of {names[0]} ({remedy})": [
            path for path in packed if (root / path).parent == tars[0].parent
        ],
    }
    refuse(root, faults)
    _warn_of_gaps(tars)
    return tars


def _tars_in(folder: Path) -> list[Path]:
    """Return the tar files of a folder, sorted by name."""
    return sorted(path for path in folder.glob("*") if path.suffix.lower() == ".tar")


def _compressed(root: Path, name: str) -> list[str]:
    """Return the paths of a split's compressed tar files."""
    flat = [path for path in root.glob("*") if name in re.split(r"[-_.]", path.name)]
    places = [*(root / name).glob("*"), *flat]
    return sorted(
        path.relative_to(root).as_posix() for path in places if PACKED.search(path.name.lower())
    )


def _warn_of_gaps(tars: Sequence[Path]) -> None:
    """Warn of numbered shards with gaps between them."""
    numbered = [match for path in tars if (match := NUMBERED.fullmatch(path.stem))]
    if len(numbered) < len(tars) or len({match[1] for match in numbered}) > 1:
        return
    numbers = {int(match[2]) for match in numbered}
    missing = sorted(set(range(min(numbers), max(numbers))) - numbers)
    if missing:
        first, width = numbered[0], len(numbered[0][2])
        file_names = [f"{first[1] or ''}{number:0{width}d}.tar" for number in missing]
        rank_zero_warn(f"{tars[0].parent} lacks shards in its numbering: {first_few(file_names)}")


def class_paths(shards: Sequence[Shard], class_names: Sequence[str] = ()) -> list[str]:
    """Return each image as ``<class>/<file>``, its place in class folders.

    A folder around all class folders is dropped.

    Args:
        shards: Shards without labels.
        class_names: Known classes, which cannot be such a folder.

    Raises:
        ValueError: An image has neither a folder nor a tar file that could be its class.
    """
    parts = [nfc(name).split("/") for name in _names_of(shards)]
    while all(len(part) > 2 for part in parts) and len({part[0] for part in parts}) == 1:
        if parts[0][0] in class_names:
            break
        parts = [part[1:] for part in parts]
    archives = [Path(shard.archive) for shard in shards for _ in shard.names]
    flat = {path for path, part in zip(archives, parts, strict=True) if len(part) == 1}
    stems = {nfc(path.stem) for path in flat}
    inside = {_class(part[0]) for part in parts if len(part) > 1}
    if flat:
        _check_one_per_class(flat, stems, inside, shards)
    return [
        "/".join([_class(part[0]), *part[1:]] if len(part) > 1 else [nfc(path.stem), *part])
        for path, part in zip(archives, parts, strict=True)
    ]


def _class(folder: str) -> str:
    """Return the class of a folder, or of a tar file inside a tar file."""
    return folder[:-4] if folder.lower().endswith(".tar") else folder


def _check_one_per_class(
    flat: set[Path], stems: set[str], inside: set[str], shards: Sequence[Shard]
) -> None:
    """Raise an error unless tar files of images without folders are one per class."""
    first = min(flat)
    fields = next((shard.fields for shard in shards if shard.fields), "")
    splits = {name for names in SPLITS.values() for name in names}
    mixed = _are_shards(stems) or bool(stems & splits) or bool(inside and not stems <= inside)
    faults = {
        "has images with .json members; pass data.label_key=<field with the label>, one of: "
        f"{fields}": bool(fields),
        f"has images without a class; {NEITHER}": mixed,
    }
    refuse(first, faults)
    log(f"The classes are the names of the tar files in {first.parent}: {first_few(sorted(stems))}")


def _are_shards(stems: set[str]) -> bool:
    """Return True for tar files with numbers for names instead of classes."""
    if all(NUMBERED.fullmatch(stem) or SHARD.fullmatch(stem) for stem in stems):
        return True
    counted = [match for stem in stems if (match := COUNTED.fullmatch(stem))]
    padded = len({(match[1], len(match[2])) for match in counted}) == 1
    return len(counted) == len(stems) and padded and min(int(match[2]) for match in counted) == 0


def read_labels(shards: Sequence[Shard], names: Sequence[str] | None) -> Labels:
    """Return the labels of WebDataset's samples.

    Args:
        shards: Shards with labels, numbers or names.
        names: Class names; None if the numbers are the names.

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
    match = re.fullmatch(r"([+-]?\d+)(\.0*)?", label, re.ASCII)
    return places.get(nfc(label), int(match[1]) if match else None)


def read_names(file: Path) -> list[str]:
    """Return the class names in a file, one per line.

    Raises:
        ValueError: A line is empty, or two are equal.
    """
    names = read_lines(file)
    wrong = [f"line {i + 1}" for i, name in enumerate(names) if not name]
    wrong += [name for name, count in Counter(names).items() if name and count > 1]
    wrong = wrong if names else ["it is empty"]
    refuse(file, {"must have one name per line, all different": wrong})
    return names


def _names_of(shards: Sequence[Shard]) -> list[str]:
    return [name for shard in shards for name in shard.names]
