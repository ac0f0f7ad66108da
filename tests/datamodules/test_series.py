"""Tables of time series: reading, splits, scaling, windows, gaps, and what must not leak."""

import re

import numpy as np
import pytest
import torch

from datamodules.series.base import SeriesDataModule
from datamodules.series.benchmarks import (
    ECLDataModule,
    ETTh1DataModule,
    ETTh2DataModule,
    ETTm1DataModule,
    ETTm2DataModule,
    ExchangeDataModule,
    TrafficDataModule,
    WeatherDataModule,
)
from datamodules.series.sample import NAMES, SampleForecasting, make_series
from datamodules.series.table import read_table
from datamodules.series.windows import Windows, split_rows

HOURS = np.datetime64("2024-01-01T00") + np.arange(60) * np.timedelta64(1, "h")


def write(path, rows=60, columns=("a", "b", "c"), times=HOURS, change=None, date="date"):
    """A table of sums of row and column number; ``change`` maps (row, column) to a cell."""
    lines = [",".join((date, *columns))]
    for row in range(rows):
        cells = [str(row + 100 * column + row % 3) for column in range(len(columns))]
        for (where, column), cell in (change or {}).items():
            if where == row:
                cells[column] = cell
        lines.append(",".join((str(times[row]).replace("T", " "), *cells)))
    path.write_text("\n".join(lines) + "\n")
    return path


def module(path, **options):
    usual = {"lookback": 4, "horizon": 2, "split": (30, 12, 12), "batch_size": 5, "num_workers": 0}
    return SeriesDataModule(path, **{**usual, **options})


def opened(path, **options):
    data = module(path, **options)
    data.setup()
    return data


# Table 11 of FFNet: windows of 96 steps for horizon 0, but Exchange's are for horizon 96.
SIZES = [
    (ETTh1DataModule, 17420, 0, (8545, 2881, 2881)),
    (ETTh2DataModule, 17420, 0, (8545, 2881, 2881)),
    (ETTm1DataModule, 69680, 0, (34465, 11521, 11521)),
    (ETTm2DataModule, 69680, 0, (34465, 11521, 11521)),
    (ExchangeDataModule, 7588, 96, (5120, 665, 1422)),
    (ExchangeDataModule, 7588, 0, (5216, 761, 1518)),
    (WeatherDataModule, 52696, 0, (36792, 5271, 10540)),
    (ECLDataModule, 26304, 0, (18317, 2633, 5261)),
    (TrafficDataModule, 17544, 0, (12185, 1757, 3509)),
]


@pytest.mark.parametrize(("kind", "rows", "horizon", "sizes"), SIZES)
def test_sizes_of_the_published_sets(kind, rows, horizon, sizes):
    counts = split_rows(rows, kind.usual_split)
    ends = np.cumsum(counts).tolist()
    usable = np.ones(rows, dtype=bool)
    values = np.zeros((rows, 1), dtype=np.float32)
    for begin, end, size in zip([0, ends[0] - 96, ends[1] - 96], ends, sizes, strict=True):
        windows = Windows(
            values, usable, range(begin, end), lookback=96, horizon=horizon, targets=1
        )
        assert len(windows) == size


def test_a_real_set_is_read_from_its_folder(tmp_path):
    folder = tmp_path / "ETT-small"
    folder.mkdir()
    write(folder / "ETTh1.csv", columns=NAMES)
    data = ETTh1DataModule(tmp_path, batch_size=5, lookback=4, horizon=2, split=[30, 12, 12])
    data.setup()
    assert data.backbone_arguments == {"variables": 7}
    assert data.sizes() == {"train": 25, "val": 11, "test": 11}
    with pytest.raises(FileNotFoundError, match=re.escape("lack ETTh2.csv; pass data.root=")):
        ETTh2DataModule(tmp_path, batch_size=5).table()
    with pytest.raises(ValueError, match=re.escape("needs 14400 rows, but the table has 60")):
        ETTh1DataModule(tmp_path, batch_size=5).setup()


def test_windows_follow_each_other_and_validation_begins_a_look_back_earlier(tmp_path):
    data = opened(write(tmp_path / "t.csv"), targets=["a"])
    raw = {split: data.dataset(split).dataset for split in ("train", "val", "test")}
    assert [raw[split].starts[0] for split in raw] == [0, 26, 38]
    assert [int(raw[split].starts[-1]) + 6 for split in raw] == [30, 42, 54]
    sample = data.dataset("val")[0, 0]
    column = np.array([row + row % 3 for row in range(60)], float)
    scaled = (column - column[:30].mean()) / column[:30].std()
    np.testing.assert_allclose(sample["series"][:, 0], scaled[26:30], rtol=1e-6)
    np.testing.assert_allclose(sample["future"][:, 0], scaled[30:32], rtol=1e-6)


def test_the_scaling_is_of_the_training_split(tmp_path):
    """Values after the training rows do not change it."""
    one = opened(write(tmp_path / "one.csv"))
    changed = {(row, 0): "1e6" for row in range(30, 60)}
    other = opened(write(tmp_path / "two.csv", change=changed))
    np.testing.assert_array_equal(one.scaling.mean, other.scaling.mean)
    np.testing.assert_array_equal(one.scaling.std, other.scaling.std)
    assert torch.equal(one.dataset("train")[0, 3]["series"], other.dataset("train")[0, 3]["series"])


@pytest.mark.parametrize("gaps", ["error", "fill", "split"])
def test_no_value_after_the_start_reaches_the_look_back(tmp_path, gaps):
    """Neither targets nor covariates, nor values carried on, depend on later rows."""
    hole = {} if gaps == "error" else {(45, 1): ""}
    chosen = {"targets": ["a"], "covariates": ["b", "c"], "gaps": gaps}
    data = opened(write(tmp_path / "one.csv", change=hole), **chosen)
    windows = data.dataset("test").dataset
    for index in range(len(windows)):
        now = int(windows.starts[index]) + 4
        later = {(row, column): "777" for row in range(now, 60) for column in range(3)}
        changed = opened(write(tmp_path / "two.csv", change=hole | later), **chosen)
        place = changed.dataset("test").dataset.starts.tolist().index(now - 4)
        assert torch.equal(
            changed.dataset("test")[0, place]["series"], data.dataset("test")[0, index]["series"]
        )


def test_covariates_are_inputs_only(tmp_path):
    data = opened(write(tmp_path / "t.csv"), targets=["c"], covariates=["a"])
    sample = data.dataset("train")[0, 0]
    assert sample["series"].shape == (4, 2)
    assert sample["future"].shape == (2, 1)
    assert data.names == ("c", "a")
    assert data.head_arguments == {"horizon": 2, "targets": 1}
    rest = opened(write(tmp_path / "t.csv"), covariates=["b"])
    assert rest.names == ("a", "c", "b")


def test_the_last_batch_of_the_test_is_kept(tmp_path):
    data = opened(write(tmp_path / "t.csv"), eval_batch_size=4)
    batches = [len(batch["series"]) for batch in data.test_dataloader()]
    assert batches == [4, 4, 3]


def test_gaps_are_named_split_or_filled(tmp_path):
    times = np.delete(HOURS, [20, 21, 50])
    path = write(tmp_path / "t.csv", rows=57, times=times)
    said = r"lacks 3 rows in 2 gaps \(2 after 2024-01-01 19:00:00; 1 after 2024-01-03 01:00:00\)"
    with pytest.raises(ValueError, match=said + ".*data.gaps=split.*data.gaps=fill"):
        opened(path)
    split = opened(path, gaps="split")
    starts = split.dataset("train").dataset.starts.tolist()
    assert starts == [*range(15), *range(22, 25)]
    filled = opened(path, gaps="fill")
    assert len(filled.dataset("train")) == 25
    values = filled.dataset("train").dataset.values
    assert torch.equal(values[20], values[19])
    assert torch.equal(values[21], values[19])


PROBLEMS = [
    ({"change": {(7, 1): ""}}, {}, "1 missing or infinite values, the first in column b at"),
    ({"change": {(7, 1): "inf"}}, {}, "1 missing or infinite values"),
    ({"change": {(7, 1): "x1"}}, {}, "row 9, column b: 'x1' is not a number"),
    ({"change": {(0, 1): "nan"}}, {"gaps": "fill"}, "begins without a value of b"),
    ({"change": {(row, 2): "5" for row in range(30)}}, {}, "c is constant over the training rows"),
    ({"times": HOURS[[*range(30), 29, *range(31, 60)]]}, {}, "1 duplicate time stamps"),
    ({"times": HOURS[[*range(28), 29, 28, *range(30, 60)]]}, {}, "is not sorted by time: 2024"),
    ({"date": "when"}, {}, "lacks the time column 'date'; its columns are when, a, b, c"),
    ({}, {"targets": ["a", "z"]}, "lacks the column z; its columns are a, b, c"),
    ({}, {"covariates": ["a", "b", "c"]}, "all columns are data.covariates"),
    ({}, {"targets": ["a"], "covariates": ["a"]}, "a is in data.targets and data.covariates"),
    ({}, {"targets": ["a", "a"]}, "data.targets=['a', 'a'] names a column twice"),
    ({}, {"targets": ["date"]}, "lacks the column date; its columns are a, b, c"),
    ({"times": HOURS[:59].astype("datetime64[m]") + np.arange(59) // 40, "rows": 59}, {},
     "uneven time stamps: 2024-01-02 16:01:00 follows 2024-01-02 15:00:00"),
    ({"columns": ("a", "a")}, {}, "has several columns named a"),
    ({}, {"horizon": 13}, "the val split has 16 rows with its look-back, but a window takes 4"),
    ({}, {"split": (40, 12, 12)}, "needs 64 rows, but the table has 60"),
    ({}, {"split": (0.5, 0.2, 0.2)}, "must be shares that add up to 1"),
    ({}, {"gaps": "maybe"}, "data.gaps must be one of error, split, fill, ignore"),
    ({}, {"constant": "drop"}, "data.constant must be error or keep"),
]  # fmt: skip


@pytest.mark.parametrize(("file", "options", "said"), PROBLEMS)
def test_faults_of_a_table_are_named(tmp_path, file, options, said):
    path = write(tmp_path / "t.csv", **file)
    with pytest.raises(ValueError, match=re.escape(said)):
        opened(path, **options)


def test_other_forms_of_csv_are_read(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("date;a\n31.12.2023 23:00;1,5\n".replace("1,5", "1.5") + "01.01.2024 00:00;2\n")
    table = read_table(path, "date")
    assert table.row_name(1) == "2024-01-01 00:00:00"
    assert table.values.tolist() == [[1.5], [2.0]]
    path.write_text("t,a\n1990/1/1 0:00,1\n1990/1/2 0:00,2\n")
    assert read_table(path, "t").row_name(0) == "1990-01-01 00:00:00"
    path.write_text("t,a\n3,1\n4,2\n")
    assert read_table(path, "t").times.tolist() == [3, 4]
    path.write_text("t,a\nyesterday,1\n")
    with pytest.raises(ValueError, match="row 2: 'yesterday' is not a time stamp"):
        read_table(path, "t")
    path.write_text("t,a\n2024-01-01,1\n,2\n")
    with pytest.raises(ValueError, match="row 3: '' is not a time stamp"):
        read_table(path, "t")
    path.write_text("t,a\n3,1\n\n4\n")
    with pytest.raises(ValueError, match="row 4: 1 cells instead of 2"):
        read_table(path, "t")
    path.write_text("")
    with pytest.raises(ValueError, match="is empty; expected a line of names"):
        read_table(path, "t")
    path.write_text("t,a\n")
    with pytest.raises(ValueError, match="holds no rows"):
        read_table(path, "t")


TIMES = [
    (("2024-1-31 0:00", "2024-1-31 1:00"), "2024-01-31 01:00:00"),
    (("1700000000000", "1700003600000"), "1700003600000"),
    (("2024-01-31T00:00:00Z", "2024-01-31T01:00:00Z"), "2024-01-31 01:00:00"),
    (("2024-03-31 01:00:00+01:00", "2024-03-31 03:00:00+02:00"), "2024-03-31 01:00:00"),
    (("2024-01-31 00:00:00.0", "2024-01-31 00:00:00.5"), "2024-01-31 00:00:00.500000"),
]


@pytest.mark.parametrize(("stamps", "second"), TIMES)
def test_forms_of_time_stamps(tmp_path, stamps, second):
    path = tmp_path / "t.csv"
    path.write_text("t,a\n" + "".join(f"{stamp},1\n" for stamp in stamps))
    table = read_table(path, "t")
    assert table.row_name(1) == second
    assert table.step() == table.times[1] - table.times[0]


def test_columns_that_are_left_out_may_hold_anything(tmp_path):
    """The remedy that the message names works."""
    path = write(tmp_path / "t.csv", columns=("a", "site"), change={(3, 1): "north"})
    with pytest.raises(ValueError, match=r"column site: 'north' .* by data.targets"):
        opened(path)
    data = opened(path, targets=["a"])
    alone = module(None)
    alone.predict_only(**data.facts())
    alone.set_predict_inputs([path])
    assert alone.predicted_table(0).names == ("a",)
    with pytest.raises(ValueError, match="ndarray cannot be forecast; pass the path of a csv"):
        alone.set_predict_inputs(np.zeros((4, 1)))


def test_predictions_begin_at_the_end_of_a_table(tmp_path):
    data = opened(write(tmp_path / "t.csv"))
    alone = module(None)
    alone.predict_only(**data.facts())
    later = write(tmp_path / "later.csv", rows=9, columns=("b", "c", "a"))
    alone.set_predict_inputs(later)
    (batch,) = alone.predict_dataloader()
    assert batch.keys() == {"series", "sample_id"}
    table = alone.predicted_table(0)
    assert table.names == ("a", "b", "c")
    np.testing.assert_allclose(batch["series"][0], data.scaling.apply(table.values), rtol=1e-6)
    assert table.row_name(3) == str(HOURS[8]).replace("T", " ") + ":00:00"
    with pytest.raises(ValueError, match="has 3 rows, but the network looks back 4"):
        alone.set_predict_inputs(write(tmp_path / "short.csv", rows=3))
    with pytest.raises(ValueError, match="lacks the columns b, c"):
        alone.set_predict_inputs(write(tmp_path / "other.csv", columns=("a",)))


def test_sample_data_have_lagged_dependencies():
    """OT follows the first load after 6 hours, more than at any other lag."""
    series = make_series(2000, 0)
    assert np.array_equal(series, make_series(2000, 0))
    assert not np.array_equal(series, make_series(2000, 1))
    changes = np.diff(series, n=2, axis=0)  # without cycles and trends
    lags = [
        abs(np.corrcoef(changes[: -lag or None, 0], changes[lag:, -1])[0, 1]) for lag in range(12)
    ]
    assert int(np.argmax(lags)) == 6


def test_sample_data_are_a_file_in_the_format_of_ett(tmp_path):
    data = SampleForecasting(tmp_path, hours=400, lookback=24, horizon=12, batch_size=8)
    data.setup()
    assert data.path.read_text().startswith("date,HUFL,HULL,MUFL,MULL,LUFL,LULL,OT\n2024-01-01 00:")
    assert data.input_shape == (24, 7)
