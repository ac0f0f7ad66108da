"""Base of datamodules of time series: splits, scaling and windows."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.base import BaseDataModule, Split, check_minimum
from datamodules.files.console import log
from datamodules.files.folders import require_names
from datamodules.files.values import refuse
from datamodules.loading.sampling import NamedDataset, SeededDataset, TolerantDataset
from datamodules.series.gaps import Gaps, close_gaps
from datamodules.series.table import Table, read_table
from datamodules.series.windows import (
    Constant,
    LastWindows,
    Scaling,
    Windows,
    fit_scaling,
    split_rows,
)


class SeriesDataModule(BaseDataModule):
    """Windows of one csv file with a time column and a column per variable.

    Validation and test begin one look-back earlier than their rows, so that each of their rows is
    predicted. Variables are scaled by mean and standard deviation of the training rows. All windows
    are evaluated, the last incomplete batch as well.

    Args:
        root: Folder of the file, or the file itself.
        file: Name of the file in the folder.
        lookback: Steps L that the network sees.
        horizon: Steps T that it predicts.
        split: Rows of training, validation and test, or their shares.
        targets: Names of the variables to predict; None for all that are not covariates.
        covariates: Names of variables that the network sees up to the forecast's start.
        time_column: Name of the column of time stamps.
        time_format: ``strptime`` format of the time stamps; None for ISO and common others.
        gaps: See ``gaps.close_gaps``.
        constant: "error" or "keep"; see ``windows.fit_scaling``.
        batch_size: Windows per training batch and process.
        **options: Of ``BaseDataModule``.
    """

    unit = "windows"
    fixed_size = True
    layout = "a csv file with a time column and a column per variable"
    example = "data=csv data.root=/data/table.csv"

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        file: str | None = None,
        lookback: int = 96,
        horizon: int = 96,
        split: Sequence[float] = (0.7, 0.1, 0.2),
        targets: Sequence[str] | None = None,
        covariates: Sequence[str] = (),
        time_column: str = "date",
        time_format: str | None = None,
        gaps: Gaps = "error",
        constant: Constant = "error",
        batch_size: int = 32,
        **options: Any,
    ) -> None:
        super().__init__(root, batch_size=batch_size, **options)
        self.file, self.gaps, self.constant = file, gaps, constant
        self.lookback = check_minimum("lookback", lookback, 1)
        self.horizon = check_minimum("horizon", horizon, 1)
        self.split, self.time_column, self.time_format = tuple(split), time_column, time_format
        self.chosen = None if targets is None else tuple(targets)
        self.covariates = tuple(covariates)
        self._table: Table | None = None
        self._closed: Table | None = None
        self._usual: tuple[str, str] = ("", "")  # format and step of the training's stamps
        self.target_names: tuple[str, ...] = ()
        self.scaling: Scaling | None = None
        self.annotations_digest = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all variables of the network's input, targets first."""
        return (*self.target_names, *self.covariates)

    @property
    def path(self) -> Path:
        """The csv file.

        Raises:
            ValueError: No file is named.
            FileNotFoundError: It does not exist.
        """
        if self.root is not None and self.root.is_file():
            return self.root
        folder = self.folder
        if self.file is not None:
            candidates = [folder / self.file, *sorted(folder.glob(f"*/{self.file}"))]
            path = next((file for file in candidates if file.is_file()), folder)
            remedy = "pass data.root=<its folder>"
            lost = [] if path.is_file() else [self.file]
            require_names(lost, f"file is missing in {folder} and its folders", remedy)
            return path
        files = sorted(folder.glob("*.csv"))
        rule = f"holds {len(files)} csv files; pass the file itself as data.root"
        refuse(folder, {rule: len(files) != 1})
        return files[0]

    def table(self) -> Table:
        """Read the file once, and choose its variables."""
        if self._table is None:
            self.prepare_data()
            self._table = read_table(self.path, self.time_column, self.time_format, self._choose)
            self._usual = (self._table.stamps.form, self._table.stamps.step_name)
        return self._table

    def _choose(self, columns: Sequence[str]) -> tuple[str, ...]:
        targets, covariates = self.chosen or (), self.covariates
        rest = tuple(name for name in columns if name not in covariates)
        self.target_names = targets or rest
        every = Counter((*targets, *covariates))
        faults = {
            "name columns twice; leave one out": [n for n, count in every.items() if count > 1],
            "leave no column to predict; leave a covariate out": not self.target_names,
        }
        refuse("data.targets and data.covariates", faults)
        return self.names

    @property
    def input_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """Shape (L, M) of an input."""
        return (self.lookback, len(self.names))

    @property
    def backbone_arguments(self) -> dict[str, Any]:
        """Number of variables, for hosts whose weights depend on it."""
        if not self.target_names:
            self.table()
        return {"variables": len(self.names)}

    @property
    def head_arguments(self) -> dict[str, Any]:
        """Horizon, and number of variables to predict."""
        return {"horizon": self.horizon, "targets": len(self.target_names)}

    def target_facts(self) -> dict[str, Any]:
        """Return the number of variables to predict."""
        return {"variables": len(self.target_names)}

    def target_identity(self) -> dict[str, Any]:
        """Return the names of all variables."""
        return {"variables": [list(self.target_names), list(self.covariates)]}

    def build(self) -> dict[Split, SeededDataset]:
        """Read the file and cut it into windows."""
        table, usable = close_gaps(self.table(), self.gaps)
        self._closed = table
        counts = split_rows(len(table), self.split)
        self.annotations_digest = hashlib.sha256(table.values.tobytes()).hexdigest()[:12]
        self.scaling = fit_scaling(table.rows(slice(0, counts[0])), self.constant)
        values = self.scaling.inputs(table)
        ends = np.cumsum(counts).tolist()
        begins = [0, ends[0] - self.lookback, ends[1] - self.lookback]
        splits: tuple[Split, ...] = ("train", "val", "test")
        built: dict[Split, SeededDataset] = {}
        for split, begin, end in zip(splits, begins, ends, strict=True):
            rows = range(max(begin, 0), end)
            windows = Windows(
                values, usable, rows, lookback=self.lookback, horizon=self.horizon,
                targets=len(self.target_names),
            )  # fmt: skip
            gap = "" if usable.all() else " rows without a gap"
            rule = (
                f"has {len(rows)} rows with its look-back, but a window takes {self.lookback} + "
                f"{self.horizon}{gap}; pass a lower data.lookback or data.horizon, or another "
                "data.split"
            )
            refuse(f"{table.source}: the {split} split", {rule: not len(windows)})
            built[split] = self.seeded(windows, _Describe(table, windows))
        return built

    def predict_only(
        self, names: Sequence[str], targets: int, mean: Sequence[float], std: Sequence[float],
        time_format: str = "", step: str = "", **facts: Any,
    ) -> None:  # fmt: skip
        """Serve prediction alone, with the variables and the scaling of a checkpoint."""
        self.target_names, self.covariates = tuple(names[:targets]), tuple(names[targets:])
        self.scaling = Scaling(np.array(mean), np.array(std))
        self._usual = (time_format, step)
        super().predict_only()

    def facts(self) -> dict[str, Any]:
        """Return the arguments of ``predict_only``."""
        assert self.scaling is not None, "call setup() first"
        return {
            "names": list(self.names),
            "targets": len(self.target_names),
            "mean": self.scaling.mean.tolist(),
            "std": self.scaling.std.tolist(),
            "time_format": self._usual[0],
            "step": self._usual[1],
        }

    def unlabelled_dataset(self, inputs: Any) -> NamedDataset:
        """Return the last look-back of a csv file or table, or of each file in a folder.

        Args:
            inputs: One or a list of paths and pandas' DataFrames.

        Raises:
            ValueError: A file lacks a variable or rows, or its last rows have gaps.
        """
        items = inputs if isinstance(inputs, list | tuple) else [inputs]
        sources: list[Path | tuple[str, str]] = []
        for number, item in enumerate(items, 1):
            if hasattr(item, "columns") and hasattr(item, "to_csv"):
                keeps = item.index.dtype.kind == "M" or item.index.name == self.time_column
                text = item.to_csv(index=keeps, index_label=self.time_column)
                sources.append((f"table {number}", text))
            elif isinstance(item, str | Path):
                path = Path(item)
                sources += sorted(path.glob("*.csv")) if path.is_dir() else [path]
            else:
                rule = "cannot be forecast; pass the path of a csv file or of a folder of them, or"
                raise ValueError(f"{type(item).__name__} {rule} a DataFrame")
        refuse(inputs, {"holds no csv files to predict": not sources})
        assert self.scaling is not None
        tables = [self._last_rows(source) for source in sources]
        windows = LastWindows(tables, self.scaling, self.lookback)
        return TolerantDataset(windows, [table.source for table in tables].__getitem__)

    def _last_rows(self, source: Path | tuple[str, str]) -> Table:
        form, step = self._usual
        table = read_table(
            source, self.time_column, self.time_format, lambda _: self.names, usual_format=form
        )
        file, least = table.source, max(2, self.lookback)
        looks = f"but the network looks back {self.lookback}; pass a longer table"
        refuse(file, {f"has {len(table)} rows, {looks}": len(table) < least})
        if step and table.stamps.step_name != step:
            log(
                f"{file} has steps of {table.stamps.step_name}, but the network was trained on "
                f"steps of {step}"
            )
        # Earlier gaps do not matter, but "fill" may need the rows before the look-back.
        last = table if self.gaps == "fill" else table.rows(slice(-self.lookback, None))
        closed, usable = close_gaps(last, self.gaps)
        rule = (
            f"has gaps in its last {self.lookback} rows; pass data.gaps=fill to carry the last "
            "value on"
        )
        refuse(file, {rule: not usable[-self.lookback :].all() or len(closed) < self.lookback})
        return closed

    def predicted_table(self, index: int) -> Table:
        """Return the look-back of a sample of ``predict_dataloader``, in the file's units."""
        windows: Any = self._to_predict().dataset
        if isinstance(windows, LastWindows):
            return windows.tables[index]
        start = int(windows.starts[index])
        assert self._closed is not None
        return self._closed.rows(slice(start, start + self.lookback))

    def test_dataloader(self) -> Any:
        """Return all windows of the test split."""
        return self._eval_loader("test")

    def predict_dataloader(self) -> Any:
        """Return the windows of ``predict_path``, or else the end of the data's own file."""
        if "predict" not in self._datasets:
            self.set_predict_inputs(self.path)
        return self._eval_loader("predict")

    def _to_predict(self) -> NamedDataset:
        return self.dataset("predict" if "predict" in self._datasets else "test")


class _Describe:
    """Names of windows, for messages and fingerprints."""

    def __init__(self, table: Table, windows: Windows) -> None:
        self.table, self.windows = table, windows

    def __call__(self, index: int) -> str:
        start = int(self.windows.starts[index])
        now = start + self.windows.lookback
        return f"{self.table.source} from {self.table.row_name(now)}"
