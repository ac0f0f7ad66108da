"""Images in parquet shards, Hugging Face's layout, with random access by the package datasets."""

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

from datamodules.files.console import log
from datamodules.files.decoding import decode_bytes, plain_file, to_rgb
from datamodules.files.folders import first_few, require_names
from datamodules.files.text_files import nfc
from datamodules.files.values import refuse
from datamodules.images.classification import ClassificationDataModule, Sample, make_sample
from datamodules.images.numbered_classes import Labels, check_listed, warn_of_absent
from datamodules.images.shares import check_share, first_by_name, share_notice
from datamodules.images.synsets import to_synsets
from datamodules.images.transforms import Transform
from datamodules.loading.sampling import SeededDataset

SPLITS: Mapping[str, tuple[str, ...]] = {"train": ("train",), "val": ("validation", "val", "valid")}
TEST = "test"  # the test split validates if it is the only one beside train
PLACE = re.compile(r"-(\d+)-of-(\d+)")
MOST_CLASSES = 1_000_000
LARGE = 1_000_000_000  # bytes that take long enough to copy to log it


class ImageParquetDataModule(ClassificationDataModule):
    """Images in parquet shards, as Hugging Face stores ImageNet.

    Layout: ``train-*.parquet`` and ``validation-*.parquet``, in ``root`` or ``root/data``, as
    https://huggingface.co/datasets/ILSVRC/imagenet-1k.

    Rows have ``{"bytes", "path"}`` of an encoded image and a label. On first use the package
    datasets copies the shards into Arrow files of the same size. All processes map these into
    memory, which gives random access to the rows. Class names are those in the shards; ImageNet's
    become synsets, to match its other copies and variants.

    Args:
        root: Folder of the shards, or the one that holds ``data/``.
        num_classes: Expected number of classes; None accepts any.
        train_share: Share of each class's training images to use: the first by the names in
            ``path``, or the first rows of shards without names.
        cache_dir: Folder of the copy; None for datasets' own place (``HF_DATASETS_CACHE``).
        image_column: Column of the images.
        label_column: Column of the labels.
        **options: Options of ``ClassificationDataModule``, such as ``image_size``.
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
        self.train_share = check_share(train_share)
        self.cache_dir = None if cache_dir is None else str(Path(cache_dir).expanduser().absolute())
        self.image_column, self.label_column = image_column, label_column

    def build(self) -> dict[Any, SeededDataset]:
        """Check the shards, copy them on first use, and open the copies."""
        if find_spec("datasets") is None:
            raise ValueError(
                'parquet shards need the package datasets; type: pip install "mixerlab[parquet]"'
            )
        shards = {split: find_shards(self.folder, names) for split, names in SPLITS.items()}
        rows = {split: [self._rows_of(shard) for shard in files] for split, files in shards.items()}
        size = sum(shard.stat().st_size for files in shards.values() for shard in files)
        if size >= LARGE:
            log(f"Copying the shards ({size / 1e9:.0f} GB); later runs reuse the copy")
        tables = {split: self._open(shards[split]) for split in SPLITS}
        labels = {split: self._labels_of(split, table) for split, table in tables.items()}
        self.class_names = self._names_of(tables, labels)
        self.check_count(self.folder)
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
            log(share_notice(self.train_share, names))
            datasets["train"].keep(first_by_name(names, labels["train"], self.train_share))
        return {split: self.seeded(images, images.place) for split, images in datasets.items()}

    def _rows_of(self, shard: Path) -> int:
        """Check the columns of a shard and return its number of rows."""
        from pyarrow import ArrowException, parquet

        try:
            metadata = parquet.read_metadata(plain_file(shard))
            schema = metadata.schema.to_arrow_schema()
        except (ArrowException, OSError) as error:
            raise ValueError(
                f"{shard} is not a whole parquet file ({_line(error)}); copy it again"
            ) from error
        for option, column in (("image", self.image_column), ("label", self.label_column)):
            columns = f"has the columns {', '.join(schema.names)} and not {column!r}"
            remedy = f"name the right one: data.{option}_column=..."
            refuse(shard, {f"{columns}; {remedy}": column not in schema.names})
        return int(metadata.num_rows)

    def _open(self, shards: Sequence[Path]) -> Any:
        """Return the table of a split, mapped into memory."""
        from datasets import Dataset, Image

        with _quiet():
            try:
                table = Dataset.from_parquet(
                    list(map(str, shards)),
                    cache_dir=self.cache_dir,
                    columns=[self.image_column, self.label_column],
                )
                return table.cast_column(self.image_column, Image(decode=False))
            except Exception as error:  # the package raises all kinds over bad metadata
                cause = error.__cause__ or error
                raise ValueError(
                    f"cannot copy the shards of {shards[0].parent} to data.cache_dir "
                    f"({_line(cause)}); replace a damaged shard, name a column of bytes and path "
                    "of encoded images by data.image_column, or pass data.cache_dir=..."
                ) from error

    def _names_of(self, tables: Mapping[str, Any], labels: Mapping[str, Labels]) -> tuple[str, ...]:
        """Return the class names, or their numbers if names are missing or ambiguous."""
        features = [table.features[self.label_column] for table in tables.values()]
        train, val = (getattr(feature, "names", None) for feature in features)
        texts = [nfc(str(name)) for name in train or ()], [nfc(str(name)) for name in val or ()]
        train, val = texts
        differ = f"{first_few(train, 2)}; {first_few(val, 2)}"
        rule = f"has class names of training and validation that differ ({differ})"
        remedy = "take both from one release"
        refuse(self.folder, {f"{rule}; {remedy}": train and val and train != val})
        if not train:
            advice = f"list all classes as names of the feature {self.label_column!r} (ClassLabel)"
            check_listed(self.folder, labels, advice)
        count = int(max(map(np.max, labels.values()))) + 1
        names = to_synsets(train or list(map(str, range(count))))
        rule = f"has label {count - 1} but names {len(names)} classes"
        refuse(self.folder, {rule: count > len(names)})
        if len(set(names)) < len(names):
            names = tuple(map(str, range(len(names))))
        warn_of_absent(self.folder, labels, names)
        return names

    def _labels_of(self, split: str, table: Any) -> Labels:
        """Return all labels of a table, (N,)."""
        column = table.data.column(self.label_column).to_numpy()
        wrong = np.ones(len(column), np.bool_)
        if column.dtype.kind in "iuf":  # pandas writes integers as floats
            wrong = ~((np.floor(column) == column) & (column >= 0) & (column < MOST_CLASSES))
        row = int(wrong.argmax()) if len(column) else 0
        rule = f"must hold class numbers from 0 to {MOST_CLASSES - 1}, got"
        where = f"{self.folder}: {self.label_column!r} of {split}"
        where_split = f"{self.folder}: the shards of {split}"
        refuse(where_split, {"are empty; copy them again": not len(column)})
        refuse(where, {f"{rule} {column[row]} in row {row}": bool(wrong.any())})
        return column.astype(np.int64)


class ParquetImages:
    """Dataset of a table's rows; each loader process maps the file on its own.

    Args:
        table: Table with one column, images as bytes and path.
        labels: Label per row.
        shards: Number of rows per shard that the table was made from.
        transform: Turns an RGB image into a tensor.
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
        return len(self.labels)

    def keep(self, indices: Labels) -> None:
        """Keep only these rows, in this order."""
        self.rows, self.labels = self.rows[indices], self.labels[indices]

    def file_names(self) -> list[str] | None:
        """Return the file names of the images in the shards; None if one is unnamed."""
        from pyarrow import compute

        (column,) = self.table.column_names
        paths = compute.struct_field(self.table.data.column(column), "path").to_pylist()
        if not all(paths):
            return None
        return [path.rpartition("/")[2] for path in paths]

    def place(self, index: int) -> str:
        """Return the shard and row of a sample."""
        row = int(self.rows[index])
        shard = int(np.searchsorted(self.ends, row, side="right"))
        return f"{self.shards[shard]}, row {row - int(self.ends[shard - 1] if shard else 0)}"

    def __getitem__(self, index: int, /) -> Sample:
        """Return ``image`` (3, H, W), ``label`` and ``sample_id``."""
        (value,) = self.table[int(self.rows[index])].values()
        name, content = self.place(index), value["bytes"]
        refuse(
            name, {"holds a path instead of image bytes; use shards with bytes": content is None}
        )
        image = to_rgb(decode_bytes(content, name), name)
        return make_sample(self.transform(image), int(self.labels[index]), index)


def find_shards(folder: Path, names: Sequence[str]) -> list[Path]:
    """Return all shards of a split, in order.

    Args:
        folder: Folder of the shards, or of ``data``, which has them.
        names: Possible names of the split. A test split validates if it is the only other one.

    Raises:
        FileNotFoundError: All shards, or some of the numbered ones, are missing.
        ValueError: The split exists under several names.
    """
    fallback = (TEST,) if tuple(names) == SPLITS["val"] else ()
    for place in (folder, folder / "data"):
        files = {name: files_of for name in names if (files_of := _shards_of(place, name))}
        files = files or {
            name: files_of for name in fallback if (files_of := _shards_of(place, name))
        }
        remedy = "all for validation; keep one"
        rule = f"has shards of several names, {remedy}"
        refuse(place, {rule: [*files] if len(files) > 1 else []})
        for files_of in files.values():
            _require_all(files_of)
            return files_of
    raise FileNotFoundError(
        f"{folder} lacks {names[0]}-*.parquet; pass the folder that holds "
        f"{ImageParquetDataModule.layout}"
    )


def _shards_of(place: Path, name: str) -> list[Path]:
    files = [*place.glob(f"{name}-*.parquet"), *place.glob(f"{name}.parquet")]
    return sorted(files or place.glob(f"{name}/*.parquet"))


def _require_all(shards: Sequence[Path]) -> None:
    counted = [match for shard in shards if (match := PLACE.search(shard.name))]
    if not counted:
        return
    total = max(int(match[2]) for match in counted)
    missing = sorted(set(range(total)) - {int(match[1]) for match in counted})
    first, count = counted[0].string, counted[0]
    names = [
        first.replace(count[0], f"-{number:0{len(count[1])}d}-of-{count[2]}") for number in missing
    ]
    require_names(names, f"shards of {total} are missing in {shards[0].parent}", "download them")


@contextmanager
def _quiet() -> Iterator[None]:
    """Show datasets' progress on terminals only, and silence its log; errors are raised anyway."""
    import datasets

    hidden, logger = datasets.are_progress_bars_disabled(), logging.getLogger("datasets")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if not hidden:
            datasets.enable_progress_bars()


def _line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
