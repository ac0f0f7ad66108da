"""Class data in parquet shards, the layout of Hugging Face's sets, read in any order."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from datamodules.files import decode_bytes, first_few, plain_file, to_rgb
from datamodules.files.console import say
from datamodules.files.text_files import nfc
from datamodules.files.whole_numbers import shown
from datamodules.images.classification import ClassificationDataModule, Sample, sample
from datamodules.images.numbered_classes import Labels, refuse_unlisted, warn_of_absent
from datamodules.images.shares import checked_share, first_by_name, share_notice
from datamodules.images.synsets import as_synsets
from datamodules.images.transforms import Transform
from datamodules.loading.sampling import SeededDataset

SPLITS: Mapping[str, tuple[str, ...]] = {"train": ("train",), "val": ("validation", "val", "valid")}
TEST = "test"  # validates where there is no other split for it
PLACE = re.compile(r"-(\d+)-of-(\d+)")
BYTES = ("binary", "large_binary", "binary_view", "null")
TEXTS = ("string", "large_string", "string_view", "null")
MOST_CLASSES = 1_000_000
LARGE = 1_000_000_000  # bytes whose copy takes a while


class ImageParquetDataModule(ClassificationDataModule):
    """Images in parquet shards: ``train-*.parquet``, ``validation-*.parquet``, also in ``data/``.

    Rows are ``{"bytes", "path"}`` of an encoded image and a label. The package datasets copies the
    shards once into Arrow files, as large as they are, which all processes then map into memory, so
    that any row is read without the ones beside it. Names of classes are those in the shards;
    ImageNet's become its synsets, by which other copies of it and its variants are known.

    Args:
        root: Folder of the shards, or the one that holds ``data/``.
        num_classes: Expected number of classes; None accepts any.
        train_share: Part of each class's training images that is used, the first by the names in
            ``path``; where the shards have none, the first rows.
        cache_dir: Where the copy lies; None for datasets' own place (``HF_DATASETS_CACHE``).
        image_column: What the shards call their images.
        label_column: What they call the labels.
        **options: Of ``ClassificationDataModule``, such as ``image_size``.
    """

    layout = "train-*.parquet and validation-*.parquet, in the folder or in data/"
    example = "data=imagenet_parquet data.root=/data/imagenet-1k"

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        num_classes: int | None = None,
        train_share: float = 1.0,
        cache_dir: str | Path | None = None,
        image_column: str = "image",
        label_column: str = "label",
        **options: Any,
    ) -> None:
        super().__init__(root, **options)
        self.expected_classes = num_classes
        self.train_share = checked_share(train_share)
        self.cache_dir = None if cache_dir is None else str(Path(cache_dir).expanduser().absolute())
        self.image_column, self.label_column = image_column, label_column

    def build(self) -> dict[Any, SeededDataset]:
        """Check the shards, copy them unless that is done, and open the copies."""
        if find_spec("datasets") is None:
            raise ValueError(
                "parquet shards are read by the package datasets: "
                "pip install -c constraints.txt -e '.[parquet]'"
            )
        shards = {split: find_shards(self.folder, names) for split, names in SPLITS.items()}
        rows = {split: [self._rows_of(shard) for shard in found] for split, found in shards.items()}
        size = sum(shard.stat().st_size for found in shards.values() for shard in found)
        if size >= LARGE:
            say(
                f"The shards hold {size / 1e9:.0f} GB; the first run copies them, later ones do not"
            )
        tables = {split: self._open(shards[split], sum(rows[split])) for split in SPLITS}
        labels = {split: self._labels_of(split, table) for split, table in tables.items()}
        self.class_names = self._names_of(tables, labels)
        if self.expected_classes not in (None, len(self.class_names)):
            raise ValueError(
                f"{self.folder} has {len(self.class_names)} classes but data.num_classes is "
                f"{self.expected_classes}; correct one of them"
            )
        make = self.augmentation
        transforms = {"train": make.train(self.image_size), "val": make.eval(self.image_size)}
        datasets = {
            split: ParquetImages(
                tables[split].select_columns([self.image_column]),
                labels[split],
                dict(zip(shards[split], rows[split], strict=True)),
                transform,
            )
            for split, transform in transforms.items()
        }
        if self.train_share < 1:
            names = datasets["train"].file_names()
            say(share_notice(self.train_share, names))
            datasets["train"].keep(first_by_name(names, labels["train"], self.train_share))
        return {split: self.seeded(images, images.place) for split, images in datasets.items()}

    def _rows_of(self, shard: Path) -> int:
        """How many rows a shard says that it has, after a look at its columns."""
        from pyarrow import ArrowException, parquet, types

        try:
            metadata = parquet.read_metadata(plain_file(shard))
            schema = metadata.schema.to_arrow_schema()
        except (ArrowException, OSError) as error:
            raise ValueError(
                f"{shard} is no whole parquet file ({_line(error)}); copy it again"
            ) from error
        for option, column in (("image", self.image_column), ("label", self.label_column)):
            if column not in schema.names:
                raise ValueError(
                    f"{shard} has the columns {', '.join(schema.names)} and no {column!r}; name "
                    f"the one that is meant: data.{option}_column=..."
                )
        kind = schema.field(self.image_column).type
        if not hasattr(kind, "get_field_index") or kind.get_field_index("bytes") < 0:
            raise ValueError(
                f"{shard}: the column {self.image_column!r} holds {kind}, and not bytes and path "
                "of encoded images"
            )
        for name, allowed in (("bytes", BYTES), ("path", TEXTS)):
            place = kind.get_field_index(name)
            inner = kind.field(place).type if place >= 0 else None
            if inner is not None and not any(getattr(types, f"is_{one}")(inner) for one in allowed):
                raise ValueError(
                    f"{shard}: {name!r} in the column {self.image_column!r} must hold "
                    f"{allowed[0]} values, got {inner}"
                )
        return int(metadata.num_rows)

    def _open(self, shards: Sequence[Path], rows: int) -> Any:
        """The table of a split, mapped into memory."""
        from datasets import Dataset, Image

        with _quiet():
            try:
                table = Dataset.from_parquet(
                    list(map(str, shards)),
                    cache_dir=self.cache_dir,
                    columns=[self.image_column, self.label_column],
                )
            except Exception as error:  # metadata of any type make the package raise all kinds
                cause = error.__cause__ or error
                raise ValueError(
                    f"the shards of {shards[0].parent} cannot be copied to where they are read "
                    f"from ({_line(cause)}); copy a damaged one again, or pass data.cache_dir=..."
                ) from error
        if len(table) != rows:
            raise ValueError(
                f"the copy of {shards[0].parent} has {len(table)} rows and its shards {rows}; "
                "remove the copy in data.cache_dir"
            )
        return table.cast_column(self.image_column, Image(decode=False))

    def _names_of(self, tables: Mapping[str, Any], labels: Mapping[str, Labels]) -> tuple[str, ...]:
        """The names of classes, or their numbers where there are none or several share one."""
        features = [table.features[self.label_column] for table in tables.values()]
        train, val = (getattr(feature, "names", None) for feature in features)
        for names in (train, val):
            if names and not all(isinstance(name, str) for name in names):
                raise ValueError(
                    f"{self.folder}: the names of classes in the shards must be texts, got "
                    f"{shown(names)}"
                )
        train, val = ([nfc(name) for name in names or ()] for names in (train, val))
        if train and val and train != val:
            raise ValueError(
                f"{self.folder}: training and validation name other classes "
                f"({first_few(train, 2)}; {first_few(val, 2)})"
            )
        if not train:
            listed = f"list all classes as names of the feature {self.label_column!r} (ClassLabel)"
            refuse_unlisted(self.folder, labels, listed)
        count = int(max(map(np.max, labels.values()))) + 1
        names = as_synsets(train or list(map(str, range(count))))
        if count > len(names):
            raise ValueError(f"{self.folder} has label {count - 1} but names {len(names)} classes")
        if len(set(names)) < len(names):
            names = tuple(map(str, range(len(names))))
        warn_of_absent(self.folder, labels, names)
        return names

    def _labels_of(self, split: str, table: Any) -> Labels:
        """All labels of a table, (N,)."""
        column = table.data.column(self.label_column).to_numpy()
        if not len(column):
            raise ValueError(f"the shards of {split} in {self.folder} have no rows")
        if column.dtype.kind == "f":  # pandas writes whole numbers so
            broken = np.flatnonzero(np.floor(column) != column)  # NaN, too
            if len(broken):
                raise ValueError(
                    f"{split} in {self.folder}: {self.label_column!r} must be an integer in row "
                    f"{broken[0]}, got {column[broken[0]]}"
                )
            column = column.astype(np.int64)
        if not np.issubdtype(column.dtype, np.integer) or column.min() < 0:
            found = column.dtype if column.dtype.kind != "i" else f"a label {column.min()}"
            raise ValueError(
                f"{split} in {self.folder}: {self.label_column!r} must hold numbers of classes "
                f"from 0 on; found {found}"
            )
        if column.max() >= MOST_CLASSES:
            raise ValueError(
                f"{split} in {self.folder}: {self.label_column!r} holds the label {column.max()}, "
                f"and {MOST_CLASSES:,} classes are the most"
            )
        return column.astype(np.int64)


class ParquetImages:
    """Rows of a table that is mapped into memory; a loader process has its own view of the file.

    Args:
        table: Of one column, images as bytes and path.
        labels: Of its rows.
        shards: That it was made from, and how many rows each has.
        transform: From RGB image to tensor.
    """

    def __init__(
        self,
        table: Any,
        labels: Labels,
        shards: Mapping[Path, int],
        transform: Transform,
    ) -> None:
        self.table, self.labels, self.transform = table, labels, transform
        self.shards, self.ends = tuple(shards), np.cumsum(list(shards.values()))
        self.rows: NDArray[np.int64] = np.arange(len(labels), dtype=np.int64)

    def __len__(self) -> int:
        """Number of images."""
        return len(self.labels)

    def keep(self, indices: Labels) -> None:
        """Keep these rows, in this order."""
        self.rows, self.labels = self.rows[indices], self.labels[indices]

    def file_names(self) -> list[str] | None:
        """The file names that the shards give their images; None where one has none."""
        from pyarrow import compute

        (column,) = self.table.column_names
        paths = compute.struct_field(self.table.data.column(column), "path").to_pylist()
        if not all(paths):
            return None
        return [path.rpartition("/")[2] for path in paths]

    def place(self, index: int) -> str:
        """The shard of a sample and its row there."""
        row = int(self.rows[index])
        shard = int(np.searchsorted(self.ends, row, side="right"))
        return f"{self.shards[shard]}, row {row - int(self.ends[shard - 1] if shard else 0)}"

    def __getitem__(self, index: int, /) -> Sample:
        """Get ``image`` (3, H, W), ``label`` and ``sample_id``."""
        (value,) = self.table[int(self.rows[index])].values()
        name, content = self.place(index), value["bytes"]
        if content is None:
            raise ValueError(f"{name} has no bytes of an image; take shards that hold the images")
        image = to_rgb(decode_bytes(content, name), name)
        return sample(self.transform(image), int(self.labels[index]), index)


def find_shards(folder: Path, names: Sequence[str]) -> list[Path]:
    """The shards of a split, all of them, in order.

    Args:
        folder: Holds them, or ``data`` which does.
        names: What the split may be called. A test split serves as validation where there is none.

    Raises:
        FileNotFoundError: There are none, or some of those that are counted in the names are not.
        ValueError: The split has several names there.
    """
    fallback = (TEST,) if tuple(names) == SPLITS["val"] else ()
    for place in (folder, folder / "data"):
        found = {name: held for name in names if (held := _named(place, name))}
        found = found or {name: held for name in fallback if (held := _named(place, name))}
        if len(found) > 1:
            raise ValueError(
                f"{place} has shards of {' and of '.join(found)}, both validation images; keep one"
            )
        for held in found.values():
            _require_all(held)
            return held
    raise FileNotFoundError(
        f"{folder} has no {names[0]}-*.parquet; pass the folder that holds "
        f"{ImageParquetDataModule.layout}"
    )


def _named(place: Path, name: str) -> list[Path]:
    found = [*place.glob(f"{name}-*.parquet"), *place.glob(f"{name}.parquet")]
    return sorted(found or place.glob(f"{name}/*.parquet"))


def _require_all(shards: Sequence[Path]) -> None:
    counted = [match for shard in shards if (match := PLACE.search(shard.name))]
    if not counted:
        return
    total = max(int(match[2]) for match in counted)
    missing = sorted(set(range(total)) - {int(match[1]) for match in counted})
    if missing:
        first, count = counted[0].string, counted[0]
        named = first.replace(count[0], f"-{missing[0]:0{len(count[1])}d}-of-{count[2]}")
        raise FileNotFoundError(
            f"{len(missing)} of {total} shards are missing in {shards[0].parent}, the first of "
            f"them {named}; download them"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Show datasets' progress on a terminal only, and leave its log to the error that is raised."""
    import datasets

    shown, log = datasets.are_progress_bars_disabled(), logging.getLogger("datasets")
    level = log.level
    log.setLevel(logging.CRITICAL)
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        log.setLevel(level)
        if not shown:
            datasets.enable_progress_bars()


def _line(error: BaseException) -> str:
    """The first line of what an error says."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
