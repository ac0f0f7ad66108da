"""The schemas of what a run folder holds, and its files after their check."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, Field, model_validator

from backbones.options.schemas import OpenPart, validate
from tasks.engine.run_folder.bounded_reading import DamagedFile, read_csv, read_json, read_yaml
from tasks.engine.run_folder.earlier_releases import with_current_targets, with_earlier_options

M = TypeVar("M", bound=BaseModel)
GROUPS = ("backbone", "head", "data", "task")
MOST_BYTES_OF_ROWS = 2**28
PACE = "images_per_second"  # in summaries of older releases
# The default of entries that may be missing and must not be null.
ABSENT: Any = None

Word = Annotated[str, Field(pattern=r"^[\w.-]+$", max_length=200)]
Count = Annotated[int, Field(ge=0, lt=2**53)]
Positive = Annotated[int, Field(ge=1, lt=2**53)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Sides = Annotated[list[Positive], Field(min_length=1, max_length=3)]
Options = dict[str, Any]


class NetworkConfig(OpenPart):
    """The group ``backbone`` of a config."""

    name: Word


class BuiltConfig(OpenPart):
    """A group that names its class."""

    target: Word = Field(alias="_target_")
    name: Word | None = None


class PaperConfig(OpenPart):
    """The row of a paper that a run claims to be."""

    name: Word = ABSENT
    table: Count | Word = ABSENT
    experiment: Word | None = None


class BuiltNetwork(OpenPart):
    """Network as a checkpoint of a task describes it."""

    backbone: NetworkConfig

    @model_validator(mode="before")
    @classmethod
    def _has_names(cls, content: Any) -> Any:
        odd = next(_odd_names(content), None)
        if odd is not None:
            raise ValueError(f"has an option named {str(odd)[:60]!r}")
        return content


class RunConfig(BuiltNetwork):
    """config.yaml."""

    task_name: Word
    head: BuiltConfig
    data: BuiltConfig
    task: BuiltConfig
    mode: Literal["fit", "validate", "test", "predict"] = "fit"
    seed: Count = 0
    ckpt: str | None = None
    input: str | None = None
    output_dir: str = ABSENT
    overrides: list[str] = ABSENT
    protocol: Word | None = None
    paper: PaperConfig | None = None
    trainer: Options = ABSENT
    optimizer: Options = ABSENT
    schedule: Options = ABSENT
    callbacks: Options = ABSENT
    logger: Options = ABSENT
    automatic: Options = ABSENT

    @model_validator(mode="after")
    def _is_resolved(self) -> Self:
        for group in GROUPS:
            if "${" in str(getattr(self, group)):
                raise ValueError(f"refers in {group} to other values by ${{...}}")
        return self


def _odd_names(part: Any) -> Iterator[Any]:
    """Yield the option names that exporters cannot write into Python files."""
    if isinstance(part, Mapping):
        yield from (k for k in part if not (isinstance(k, str) and re.fullmatch(r"[\w.-]+", k)))
    items = part.values() if isinstance(part, Mapping) else part
    if isinstance(part, Mapping | list | tuple):
        for item in items:
            yield from _odd_names(item)


class DataFacts(OpenPart):
    """Data in a summary."""

    name: str = ABSENT
    root: str | None = None
    samples: dict[str, Count | None] = ABSENT
    left_out: str = ABSENT
    classes: Count | None = None
    fingerprints: dict[str, str | None] = ABSENT


class PaperFigure(OpenPart):
    """A figure beside the paper's."""

    paper: Finite
    ours: float | None
    difference: float | None = None


class PaperFacts(OpenPart):
    """Row of a paper in a summary."""

    row: str
    metrics: dict[str, PaperFigure]
    why_not: str = ABSENT


class TimeFacts(OpenPart):
    """End of a training by ``trainer.max_time``, at a share of its schedule."""

    share: Annotated[float, Field(ge=0, lt=1)]
    max_time: str | Options


class RunSummary(OpenPart):
    """summary.json of a run that has come to its end; null stands for a figure that is NaN."""

    metrics: dict[str, float | None]
    parameters: float
    backbone_macs: float
    seconds: float
    task: str = ABSENT
    mode: str = ABSENT
    backbone_parameters: Amount = ABSENT
    macs_at: Sides = ABSENT
    network: Options | None = None
    data: DataFacts | None = None
    counts: dict[str, list[Amount]] = ABSENT
    paper: PaperFacts = ABSENT
    ended_by_time: TimeFacts = ABSENT
    fingerprint: dict[str, list[Finite]] = ABSENT
    overrides: list[str] = ABSENT
    samples_per_second: Amount | None = None
    waiting_for_data: Amount | None = None
    num_workers: Count | None = None

    @model_validator(mode="after")
    def _pace_is_whole(self) -> Self:
        if self.samples_per_second and None in (self.waiting_for_data, self.num_workers):
            raise ValueError("has samples_per_second without waiting_for_data or num_workers")
        return self


def _checked(path: Path, schema: type[M], content: Any) -> dict[str, Any]:
    try:
        validate(schema, content)
    except ValueError as error:
        raise DamagedFile(f"{path} is damaged: {error}") from None
    values: dict[str, Any] = content
    return values


def read_run_config(path: Path) -> dict[str, Any]:
    """Read a run's config.yaml as plain values, without building or resolving any.

    Raises:
        FileNotFoundError: The file does not exist.
        DamagedFile: It cannot be read, or does not fit the schema.
    """
    return check_run_config(path, read_yaml(path))


def check_run_config(path: Path, content: Any) -> dict[str, Any]:
    """Return the config of a run, read from a file, with today's names.

    Raises:
        DamagedFile: It does not fit the schema.
    """
    return with_earlier_options(with_current_targets(_checked(path, RunConfig, content)))


def read_summary(path: Path) -> dict[str, Any]:
    """Read a run's summary.json; of metrics null is NaN.

    Raises:
        FileNotFoundError: The file does not exist.
        DamagedFile: It cannot be read, or does not fit the schema.
    """
    content = _checked(path, RunSummary, _with_current_names(read_json(path)))
    metrics = content["metrics"].items()
    return content | {"metrics": {k: math.nan if v is None else float(v) for k, v in metrics}}


def _with_current_names(content: Any) -> Any:
    """Rename the entries that older releases named by images."""
    if not isinstance(content, dict):
        return content
    pace = {"samples_per_second": content[PACE]} if PACE in content else {}
    content = {key: value for key, value in content.items() if key != PACE} | pace
    data = content.get("data")
    if isinstance(data, dict) and "images" in data:
        content["data"] = {("samples" if key == "images" else key): data[key] for key in data}
    return content


def read_classes(path: Path) -> list[dict[str, Any]]:
    """Read a run's classes.csv: the first column names the class, the others are figures or empty.

    Raises:
        FileNotFoundError: The file does not exist.
        DamagedFile: It cannot be read, or has other cells.
    """
    (first, *names), *lines = [line for line in read_csv(path) if line] or [[""]]
    try:
        return [
            {first: line[0], **dict(zip(names, map(_figure, line[1:]), strict=True))}
            for line in lines
        ]
    except ValueError as error:
        raise DamagedFile(f"{path} is damaged: {error}") from error


def _figure(cell: str) -> float | None:
    return float(cell) if cell else None


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics.csv without empty cells; empty if the file is missing.

    A last line without an end was cut off by a kill and is left out, and so is every line that is
    no row of numbers.

    Raises:
        DamagedFile: It cannot be read.
    """
    if not path.exists():
        return []
    columns, *lines = list(read_csv(path, MOST_BYTES_OF_ROWS))[:-1] or [[]]
    rows = (_row(columns, cells) for cells in lines if len(cells) == len(columns))
    return [row for row in rows if isinstance(row.get("step"), int)]


def _row(columns: list[str], cells: list[str]) -> dict[str, Any]:
    """Return the numbers of a line by column; empty if one is invalid."""
    try:
        return {
            key: int(cell) if cell.isdecimal() else float(cell)
            for key, cell in zip(columns, cells, strict=True)
            if cell
        }
    except ValueError:
        return {}
