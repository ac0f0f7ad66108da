"""Several labels per image from a csv file: its forms, and the images that it lists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from datamodules.annotation_formats.splits import TRAIN, VAL, SplitOptions, draw_names, draw_notice
from datamodules.files.class_order import ClassOrder, sort_classes
from datamodules.files.console import log
from datamodules.files.folders import first_few, list_images, require_names
from datamodules.files.text_files import FolderNames, normalise_path, read_csv
from datamodules.files.values import refuse
from datamodules.images.classification import ImageFiles, Sample
from datamodules.images.transforms import Transform

SPLIT = "split"  # column that divides the images
LISTS = ("labels", "label", "tags", "tag", "classes", "class")  # names of a column of lists
SEPARATORS = ";|,"
FLAGS = {"0": 0, "1": 1, "0.0": 0, "1.0": 1, "false": 0, "true": 1}
Row = Mapping[str, str]
Flags = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class LabelTable:
    """Images of a csv file with their labels.

    Attributes:
        source: The file.
        images: Paths relative to the file's folder.
        labels: 0 or 1 per image and class (N, K).
        splits: Entry of the column "split" per image; empty without one.
        names: Names of the classes.
    """

    source: Path
    images: tuple[str, ...]
    labels: Flags
    splits: tuple[str, ...]
    names: tuple[str, ...]

    def rows(self, indices: Sequence[int]) -> LabelTable:
        """Return some rows, in the order of the file."""
        order = sorted(indices)
        return LabelTable(
            self.source,
            tuple(self.images[index] for index in order),
            self.labels[order],
            (),
            self.names,
        )


class LabelledFiles(ImageFiles):
    """Dataset of the images of a table.

    Args:
        table: The table.
        transform: Function from an RGB image to a tensor.
    """

    def __init__(self, table: LabelTable, transform: Transform) -> None:
        super().__init__(table.source.parent, table.images, range(len(table.images)), transform)
        self.flags = table.labels

    def __getitem__(self, index: int, /) -> Sample:
        """Return ``image`` (3, H, W), ``label`` (K,) of 0 and 1, and ``sample_id``."""
        class_names = super().__getitem__(index)
        return {**class_names, "label": torch.from_numpy(self.flags[index].astype(np.float32))}


def read_label_table(
    path: Path,
    *,
    names: Sequence[str] | None = None,
    separator: str | None = None,
    order: ClassOrder = "text",
) -> LabelTable:
    """Read a csv file whose first column is the image.

    A second column lists labels, such as "cat;dog"; or each further column is a class, with 0 or 1
    per image, even the only one. A column "split" may divide the images.

    Args:
        path: The file; images are relative to its folder.
        names: The classes, for another file of the same set; None takes them from the file.
        separator: Separator of listed labels; None recognises ; | and commas.
        order: Order of listed classes; columns keep theirs.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: Names the row, and what is wrong with it.
    """
    rows = read_csv(path)
    refuse(path, {"lists no image below its first line": not rows})
    image, *columns_after = rows[0]
    columns = [name for name in columns_after if name.lower() != SPLIT]
    rule = (
        f"has the columns {first_few(rows[0])}; it needs the image, then a column of labels or a "
        "column of 0 and 1 per class"
    )
    refuse(path, {rule: not columns})
    if len(columns) == 1 and _has_lists(columns[0], [row[columns[0]] for row in rows]):
        class_names, labels = _read_lists(path, rows, columns[0], names, separator, order)
    else:
        class_names, labels = tuple(columns), _read_flags(path, rows, columns)
    rule = (
        f"has the classes {first_few(class_names)}, but the training images have "
        f"{first_few(names or ())}; both files need the same ones in the same order"
    )
    refuse(path, {rule: names is not None and tuple(names) != class_names})
    images = _find_images(path, [row[image] for row in rows])
    split = next((name for name in columns_after if name.lower() == SPLIT), None)
    splits = tuple(row[split].lower() for row in rows) if split is not None else ()
    return LabelTable(path, images, labels, splits, class_names)


def divide(table: LabelTable, options: SplitOptions) -> tuple[LabelTable, LabelTable]:
    """Return training and validation images, by the column "split" or by drawing some.

    Raises:
        ValueError: A split lacks images.
    """
    if not table.splits:
        val_names = draw_names(table.images, options, table.source)
        log(f"{table.source}: {draw_notice(len(val_names), len(table.images), options)}")
        places = range(len(table.images))
        val = [index for index in places if table.images[index] in val_names]
        return table.rows([*{*places} - {*val}]), table.rows(val)
    parts = []
    for kind in (TRAIN, VAL):
        indices = [index for index, split in enumerate(table.splits) if split in kind]
        counted = ", ".join(f"{n} {split!r}" for split, n in Counter(table.splits).items())
        rule = (
            f"has a column {SPLIT!r} without {kind[0]!r}, but with {counted}; write train or val "
            "in each row, or drop the column to draw validation images"
        )
        refuse(table.source, {rule: not indices})
        parts.append(table.rows(indices))
    unused = len(table.splits) - sum(len(part.images) for part in parts)
    if unused:
        log(f"{table.source}: {unused} images of other splits than train and val are left out")
    return parts[0], parts[1]


def find_tables(root: Path, name: str, validation: Path) -> tuple[Path, Path | None]:
    """Return the csv file, or those of the folders train and val, of which the last may be missing.

    Args:
        root: Folder of the data set.
        name: Name of the file.
        validation: Folder of the validation images.

    Raises:
        FileNotFoundError: No such file exists.
    """
    if (root / name).is_file():
        return root / name, None
    train, val = root / "train" / name, validation / name
    places = f"{root} nor in {root / 'train'}"
    remedy = "pass the csv file of the labels, relative to data.root"
    lost = [] if train.is_file() else [str(train)]
    require_names(lost, f"file data.labels={name} exists neither in {places}", remedy)
    return train, val if val.is_file() else None


def notices(tables: Mapping[str, LabelTable]) -> list[str]:
    """Return one line per finding that may be unintended: classes without images, unlisted images.

    Args:
        tables: By split.
    """
    lines = []
    for split, table in tables.items():
        counts = zip(table.names, table.labels.sum(0), strict=True)
        absent = [name for name, count in counts if not count]
        if absent:
            listing = first_few(absent, 10)
            lines.append(f"{len(absent)} classes do not occur in {split}: {listing}")
    for folder in dict.fromkeys(table.source.parent for table in tables.values()):
        names_in_file = {
            image
            for table in tables.values()
            if table.source.parent == folder
            for image in table.images
        }
        unlisted = [name for name in list_images(folder) if name not in names_in_file]
        if unlisted:
            lines.append(
                f"{len(unlisted)} images in {folder} are unlisted or unused: "
                f"{first_few(unlisted, 2)}"
            )
    return lines


def _has_lists(column: str, cells: Sequence[str]) -> bool:
    """Return True if the only column lists labels; with 0 and 1 alone it is a class."""
    if column.lower() in LISTS:
        return not all(map(_is_flag, cells))
    return not _is_flag(cells[0])


def _is_flag(cell: str) -> bool:
    return cell.lower() in FLAGS


def _read_flags(path: Path, rows: Sequence[Row], columns: Sequence[str]) -> Flags:
    strays = [
        f"image {number} has {row[name]!r} in column {name!r}"
        for number, row in enumerate(rows, start=1)
        for name in columns
        if not _is_flag(row[name])
    ]
    refuse(path, {"must hold 1 if the image shows the class, else 0": strays})
    return np.array([[FLAGS[row[name].lower()] for name in columns] for row in rows], np.uint8)


def _read_lists(
    path: Path,
    rows: Sequence[Row],
    column: str,
    names: Sequence[str] | None,
    separator: str | None,
    order: ClassOrder,
) -> tuple[tuple[str, ...], Flags]:
    cells = [row[column] for row in rows]
    separator = separator or _find_separator(path, cells, column)
    names_in_file = [[label.strip() for label in cell.split(separator)] for cell in cells]
    for number, labels in enumerate(names_in_file, start=1):
        rule = (
            f"image {number} has an empty or a repeated label in column {column!r} "
            f"({cells[number - 1]!r}); for images without labels write a column of 0 and 1 per "
            "class"
        )
        refuse(f"{path}:", {rule: not all(labels) or len({*labels}) < len(labels)})
    labels_seen = {label for labels in names_in_file for label in labels}
    classes = tuple(sort_classes(sorted(labels_seen), order)) if names is None else tuple(names)
    strange = sorted(labels_seen - {*classes})
    refuse(path, {"has labels that the training images lack; correct them": strange})
    place = {name: index for index, name in enumerate(classes)}
    flags = np.zeros((len(rows), len(classes)), np.uint8)
    for index, labels in enumerate(names_in_file):
        flags[index, [place[label] for label in labels]] = 1
    return classes, flags


def _find_separator(path: Path, cells: Sequence[str], column: str) -> str:
    """Return the only separator that the cells have.

    Raises:
        ValueError: They have several, or are lists as Python or JSON writes them.
    """
    class_names = [mark for mark in SEPARATORS if any(mark in cell for cell in cells)]
    bracketed = next((cell for cell in cells if cell.startswith("[") and cell.endswith("]")), None)
    faults = {
        f"has the separators {' and '.join(class_names)}; pass the one between labels, such as "
        f"data.label_separator='{class_names[0] if class_names else ''}'": len(class_names) > 1,
        f"has lists in brackets ({bracketed!r}); write the labels alone, such as cat;dog": (
            bracketed is not None
        ),
    }
    refuse(f"{path}: column {column!r}", faults)
    if not class_names and separated_by_spaces(cells):
        log(
            f"{path}: words of column {column!r} recur in several labels ({first_few(cells, 3)}); "
            "if spaces separate labels, pass data.label_separator=' '"
        )
    return class_names[0] if class_names else SEPARATORS[0]


def separated_by_spaces(cells: Sequence[str]) -> bool:
    """Return True if half of the labels have several words, some of which recur in other labels."""
    labels = {frozenset(cell.split()) for cell in cells}
    longer = [label for label in labels if len(label) > 1]
    words = Counter(word for label in labels for word in label)
    return 2 * len(longer) >= len(labels) and any(words[w] > 1 for label in longer for w in label)


def _find_images(path: Path, listed_names: Sequence[str]) -> tuple[str, ...]:
    """Return the names on disk of the listed images."""
    counted = Counter(map(normalise_path, listed_names))
    twice = [name for name, count in counted.items() if count > 1]
    on_disk = FolderNames(path.parent)
    class_names = [on_disk.find(name) for name in listed_names]
    missing = [name for name, real in zip(listed_names, class_names, strict=True) if real is None]
    faults = {
        f"lists {len(twice)} images more than once (keep one row per image, with all its "
        "labels)": twice,
        f"lists {len(missing)} of {len(listed_names)} images that {path.parent} lacks (the first "
        "column must name files relative to that folder)": missing,
    }
    refuse(path, faults)
    return tuple(normalise_path(str(name)) for name in class_names)
