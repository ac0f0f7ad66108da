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
from datamodules.series.sample import NAMES
from datamodules.series.table import read_table
from datamodules.series.windows import Windows, split_rows
from tasks.forecasting.pictures import Forecast
from tests.errors import refuses

HOURS = np.datetime64("2024-01-01T00") + np.arange(60) * np.timedelta64(1, "h")
# Local hours around both changes of clocks.
SPRING = np.delete(np.datetime64("2024-03-30T00") + np.arange(61) * np.timedelta64(1, "h"), 26)
AUTUMN = np.datetime64("2024-10-26T00") + np.sort([*range(59), 26]) * np.timedelta64(1, "h")


def write(
    path, rows=60, columns=("a", "b", "c"), times=HOURS, change=None, date="date", separator=","
):
    """A table of sums of row and column number; ``change`` maps (row, column) to a cell."""
    lines = [separator.join((date, *columns))]
    for row in range(rows):
        cells = [str(row + 100 * column + row % 3) for column in range(len(columns))]
        for (where, column), cell in (change or {}).items():
            if where == row:
                cells[column] = cell
        lines.append(separator.join((str(times[row]).replace("T", " "), *cells)))
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
    with pytest.raises(FileNotFoundError, match=r"file is missing .*: ETTh2.csv; pass data.root="):
        ETTh2DataModule(tmp_path, batch_size=5).table()
    with pytest.raises(ValueError, match="at most the table's 60 rows, not 14400"):
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


def test_gaps_are_named_split_or_filled(tmp_path):
    times = np.delete(HOURS, [20, 21, 50])
    path = write(tmp_path / "t.csv", rows=57, times=times)
    said = r"lacks 3 rows in 2 gaps \(2 after 2024-01-01 19:00:00; 1 after 2024-01-03 01:00:00\)"
    refuses(said + ".*data.gaps=split.*data.gaps=fill", opened, path)
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
    ({"change": {(0, 1): "nan"}}, {"gaps": "fill"}, "begins without values, so"),
    ({"change": {(row, 2): "5" for row in range(30)}}, {}, "are constant over the training rows"),
    ({"times": HOURS[[*range(30), 29, *range(31, 60)]]}, {}, "1 duplicate time stamps"),
    ({"times": HOURS[[*range(28), 29, 28, *range(30, 60)]]}, {}, "is not sorted by time: 2024"),
    ({"date": "when"}, {}, "lacks the time column 'date'; its columns are when, a, b, c"),
    ({}, {"targets": ["a", "z"]}, "has the columns a, b, c and lacks: z"),
    ({}, {"covariates": ["a", "b", "c"]}, "leave no column to predict; leave a covariate out"),
    ({}, {"targets": ["a"], "covariates": ["a"]}, "name columns twice; leave one out: a"),
    ({}, {"targets": ["a", "a"]}, "name columns twice; leave one out: a"),
    ({}, {"targets": ["date"]}, "has the columns a, b, c and lacks: date"),
    ({"times": HOURS[:59].astype("datetime64[m]") + np.arange(59) // 40, "rows": 59}, {},
     "uneven time stamps: 2024-01-02 16:01:00 follows 2024-01-02 15:00:00"),
    ({"columns": ("a", "a")}, {}, "must name different columns, got ['date', 'a', 'a']"),
    ({"columns": ("a", "")}, {}, "must name different columns, got ['date', 'a', '']"),
    ({"change": {(7, 1): "1_000"}}, {}, "column b: '1_000' is not a number"),
    ({"change": {(59, 1): "1e300"}}, {}, "'1e300' is not a number; choose a unit in which float32 "
     "holds it, or leave the column out by data.targets=[...]"),
    ({"change": {(row, 1): f"0.00{row % 7}" for row in range(59)} | {(59, 1): "1e38"}}, {},
     "too far from the training rows; correct them: 1e+38 in column b at 2024-01-03 11:00:00"),
    ({"change": {(7, 1): "?"}}, {}, "1 missing or infinite values, the first in column b at"),
    ({"change": {(7, 1): "0:00:00"}}, {}, "write date and time of day into one column"),
    ({"change": {(7, 1): "north"}}, {}, "is not a number; write a column per series if it names"),
    ({"change": {(7, 1): "12,345.6"}, "separator": ";"}, {}, "; write thousands without commas"),
    ({"change": {(7, 1): "1,5"}, "separator": ";"}, {}, "; write decimals with a point"),
    ({"times": HOURS.repeat(2)}, {}, "has 2 rows for most time stamps; write a column per series"),
    ({"times": np.tile(HOURS[:30], 2)}, {}, "has 2 rows for most time stamps"),
    ({"times": ["--5", *HOURS]}, {}, "row 2: '--5' is not a time stamp"),
    ({"times": [*HOURS[:59], "9999-01-01 00"]}, {"gaps": "split"},
     "(69907357 after 2024-01-03 10:00:00) are too many; correct the time stamps there"),
    ({"times": [f"{day:02}/{day:02}/2023" for day in range(1, 13)], "rows": 12}, {},
     "'01/01/2023' may begin with the day or the month; pass data.time_format='%d/%m/%Y'"),
    ({"times": SPRING}, {}, "or data.gaps=ignore to take rows as steps, such as business days; "
     "clocks may have changed that night: write times in UTC"),
    ({"times": AUTUMN}, {}, "1 duplicate time stamps (2024-10-27 02:00:00); keep one row each; "
     "clocks may have changed that night"),
    ({}, {"horizon": 13}, "the val split has 16 rows with its look-back, but a window takes 4"),
    ({}, {"split": (40, 12, 12)}, "at most the table's 60 rows, not 64"),
    ({}, {"split": (0.5, 0.2, 0.2)}, "must be three positive shares that add up to 1, or rows"),
]  # fmt: skip


@pytest.mark.parametrize(("file", "options", "said"), PROBLEMS)
def test_faults_of_a_table_are_named(tmp_path, file, options, said):
    path = write(tmp_path / "t.csv", **file)
    refuses(re.escape(said), opened, path, **options)


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
    refuses("row 2: 'yesterday' is not a time stamp", read_table, path, "t")
    path.write_text("t,a\n2024-01-01,1\n,2\n")
    refuses("row 3: '' is not a time stamp", read_table, path, "t")
    path.write_text("t,a\n3,1\n\n4\n")
    refuses("row 4: 1 cells, but the first row names 2", read_table, path, "t")
    path.write_text("")
    refuses("is empty; expected a line of names", read_table, path, "t")
    path.write_text("t,a\n")
    refuses("holds no rows", read_table, path, "t")


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
    assert table.stamps.step == table.times[1] - table.times[0]
    again = tmp_path / "again.csv"
    again.write_text("t,a\n" + "".join(f"{one},1\n" for one in table.stamps.texts(table.dates())))
    assert (read_table(again, "t").times == table.times).all()


def dates(first, count, step):
    return np.datetime64(first) + np.arange(count) * np.timedelta64(1, step)


BUSINESS = np.busday_offset("2024-01-01", np.arange(60))
NEXT = {
    "months": (dates("2019-11", 60, "M").astype("datetime64[D]"), "1 month",
               ["2024-11-01", "2024-12-01"]),
    "ends": (dates("2019-04", 60, "M").astype("datetime64[D]") - 1, "1 month",
             ["2024-03-31", "2024-04-30"]),
    "quarters": (dates("2010-01", 180, "M")[::3], "3 months", ["2025-01", "2025-04"]),
    "minutes": ([f"20240101{n // 60:02}{n % 60:02}" for n in range(60)], "1 minute",
                ["202401010100", "202401010101"]),
    "compact": ([str(day).replace("-", "") for day in dates("2024-01-01", 60, "D")], "1 day",
                ["20240301", "20240302"]),
    "days": ([f"{day.item():%d/%m/%Y}" for day in dates("2024-01-01", 60, "D")], "1 day",
             ["01/03/2024", "02/03/2024"]),
    "seconds": ([f"{1700000000 + 3600 * n}.0" for n in range(60)], "3600",
                ["1700216000", "1700219600"]),
    "business": (BUSINESS, "1 day", ["2024-03-25", "2024-03-26"]),
    "iso": ([f"{hour}:00Z" for hour in HOURS], "1 hour",
            ["2024-01-03T12:00Z", "2024-01-03T13:00Z"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", NEXT)
def test_steps_of_the_calendar_go_on_in_the_form_of_the_file(kind, tmp_path):
    times, step, later = NEXT[kind]
    options = {"time_column": "ds", "gaps": "ignore" if kind == "business" else "error"}
    path = tmp_path / "t.csv"
    lines = [f"{time},{row % 7}\n" for row, time in enumerate(times)]
    path.write_text("".join(["ds,a\n", *lines]))
    data = opened(path, **options)
    assert data.facts()["step"] == step
    stamps, last = data.table().stamps, data.table().times[-1]
    assert stamps.texts(stamps.after(last, 2)) == later
    forecast = Forecast("t", data.predicted_table(0), ("a",), np.zeros((2, 1)))
    assert forecast.plain()["time_column"] == "ds"
    path.write_text("".join(["ds,a\n", *lines, *(f"{time},0\n" for time in later)]))
    longer = opened(path, **options).table()
    assert (longer.dates()[-2:] == stamps.after(last, 2)).all()
    assert longer.stamps == stamps


def test_tables_in_memory_are_predicted(tmp_path):
    pandas = pytest.importorskip("pandas")
    data = opened(write(tmp_path / "t.csv"))
    alone = module(None)
    alone.predict_only(**data.facts())
    frame = pandas.read_csv(tmp_path / "t.csv", parse_dates=["date"])
    for one in (tmp_path / "t.csv", frame, frame.set_index("date")):
        alone.set_predict_inputs(one)
        table = alone.predicted_table(0)
        assert table.values.tolist() == data.table().values[-4:].tolist()
        assert table.row_name(3) == "2024-01-03 11:00:00"


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
    with pytest.raises(ValueError, match="has the columns a and lacks: b, c"):
        alone.set_predict_inputs(write(tmp_path / "other.csv", columns=("a",)))
