"""Group runs of one task into rows: runs that differ only in the seed share one."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from backbones.checkpoints.equations import FINGERPRINT, first_change
from backbones.options import listed
from tasks.engine.family import Direction, families
from tools.cli.network_names import name_with_model, network_name
from tools.comparing.evaluations import data_name, uses_sample_data
from tools.comparing.paper_figures import Figures, published_figures
from tools.comparing.run_records import RunRecord
from tools.runs.default_values import TOKEN_MIXER, drop_defaults
from tools.runs.folder import may_differ

# Settings that change what a metric counts, with their default; other values are always shown.
COUNTED = {"data.skip_unusable_boxes": False}
ALIASES = {
    "backbone": "backbone.name", "head": "head.name", "task": "task_name",
    "experiment": "paper.experiment", "backbone.token_mixer": "backbone.token_mixer.name",
}  # fmt: skip
MODEL = "backbone.model"  # of another library


@dataclass
class Row:
    """Equal runs with different seeds.

    Attributes:
        label: Values of the settings that name the rows.
        runs: One per seed.
        settings: Differences from other rows with the same label.
        mean: Mean of each metric over the runs.
        deviation: Sample standard deviation of each metric; None for a single run.
        paper: The paper's figures for this run, or None.
        terms: A letter shared by rows that differ only in the mixer, from ``terms.mark_terms``.
    """

    label: tuple[str, ...]
    runs: list[RunRecord]
    settings: str = ""
    mean: dict[str, float] = field(default_factory=dict)
    deviation: dict[str, float | None] = field(default_factory=dict)
    paper: Figures | None = None
    terms: str = ""

    @property
    def first(self) -> RunRecord:
        """Return one of the runs; all values outside of ``mean`` are equal."""
        return self.runs[0]

    @property
    def name(self) -> str:
        """Return the row's name for plots and messages."""
        return " ".join([*self.label, self.settings]).strip()

    def average(self, figure: str) -> float:
        """Return the mean of a number of the summaries."""
        return statistics.fmean(float(run.summary[figure]) for run in self.runs)


def make_rows(
    runs: Sequence[RunRecord], by: Sequence[str], free_keys: Sequence[str], notes: list[str]
) -> list[Row]:
    """Group finished runs of one evaluation, and average each group over its seeds.

    Args:
        runs: Runs of one task and evaluation.
        by: Settings that name the rows, dotted or one of ``ALIASES``.
        free_keys: Settings that may differ within a row, besides those without effect on results.
        notes: Gets a sentence for each split or left out run.
    """
    groups: dict[str, list[RunRecord]] = {}
    for run in _drop_defaults(runs, by):
        groups.setdefault(json.dumps(identity(run, free_keys), sort_keys=True), []).append(run)
    rows = []
    for group in (part for equal_runs in groups.values() for part in _split_by_code(equal_runs)):
        label = tuple(_value(group[0], key) for key in by)
        rows.append(Row(label, _one_per_seed(group, notes)))
    rows.sort(key=lambda row: row.label)
    _describe_differences(rows, free_keys, notes)
    for row in rows:
        _name_counted(row)
        _average(row, notes)
        row.paper = published_figures(row.first, notes)
    return rows


def _split_by_code(runs: Sequence[RunRecord]) -> list[list[RunRecord]]:
    """Split runs of equal settings by what their code computes.

    Older runs without a fingerprint belong to the others, unless those differ among themselves.
    """
    parts: list[list[RunRecord]] = []
    older = [run for run in runs if FINGERPRINT not in run.summary]
    for run in (run for run in runs if FINGERPRINT in run.summary):
        code = run.summary[FINGERPRINT]
        matches = (part for part in parts if not first_change(part[0].summary[FINGERPRINT], code))
        part = next(matches, None)
        if part is None:
            parts.append(part := [])
        part.append(run)
    if len(parts) < 2:
        return [list(runs)]
    names = [f"version {number}" for number in range(1, len(parts) + 1)]
    return [
        [replace(run, summary={**run.summary, "code": name}) for run in part]
        for part, name in zip([*parts, older], [*names, "unknown"], strict=True)
        if part
    ]


def refuse_unknown(runs: Sequence[RunRecord], keys: Sequence[str]) -> None:
    """Check that settings exist in at least one run.

    Raises:
        ValueError: A setting is unknown to all runs.
    """
    run_keys = (key for run in runs for key in (*run.config, *_typed_options(run)))
    names = sorted({*ALIASES, "data", *run_keys})
    for key in keys:
        if key not in names:
            from backbones.options import unknown  # imports torch

            raise ValueError(
                unknown("setting of these runs", key, names, "see a run's config.yaml")
            )


def identity(run: RunRecord, free_keys: Sequence[str] = ()) -> dict[str, Any]:
    """Return everything that makes a run another experiment: settings, data and network."""
    sample = uses_sample_data(run)
    paths = [setting(run, key)[0] for key in free_keys if key not in COUNTED]
    settings = {
        key: value
        for key, value in run.config.items()
        if value is not None and key != "seed" and key not in paths and not may_differ(key)
    }
    # Sample data is the same in any folder; for real data another folder may be another dataset.
    root = None if sample or "data.root" in paths else run.config.get("data.root")
    for key, usual in COUNTED.items():
        if settings.get(key) == usual:  # older runs lack the setting
            del settings[key]
    images = (run.summary.get("data") or {}).get("samples") or {}
    data = {"data.root": root, "parameters": run.summary["parameters"]}
    # Another name for each equation of the same settings, see ``_split_by_code``.
    code = run.summary.get("code")
    return settings | data | {"training images": images.get("train"), "code": code}


def setting(run: RunRecord, key: str) -> tuple[str, Any]:
    """Return the dotted name and the value of a setting's short name."""
    if key == "data":
        return "data._target_", data_name(run)
    path = ALIASES.get(key, key)
    if key == "backbone":
        token = run.config.get(f"{TOKEN_MIXER}.name") or run.config.get(TOKEN_MIXER)
        name = name_with_model(run.config[path], run.config.get(MODEL))
        return path, network_name(name, token, run.config.get("backbone.mixer"))
    if path not in run.config and key in _typed_options(run):
        return path, _typed_options(run)[key]
    if key == "head" and path not in run.config:
        return path, str(run.config.get("head._target_", "")).rpartition(".")[2]
    return path, run.config.get(path)


def _typed_options(run: RunRecord) -> dict[str, str]:
    """Return the typed options, such as the recipe, which the config does not keep."""
    words = run.config.get("overrides") or ()
    return dict(str(word).lstrip("+").partition("=")[::2] for word in words)


def _drop_defaults(runs: Sequence[RunRecord], by: Sequence[str]) -> list[RunRecord]:
    """Drop options with default values that other runs lack."""
    label_keys = {MODEL, *(ALIASES.get(key, key) for key in by)}
    configs = drop_defaults([dict(run.config) for run in runs])
    labels = [{key: run.config[key] for key in label_keys & run.config.keys()} for run in runs]
    return [
        replace(run, config=config | label)
        for run, config, label in zip(runs, configs, labels, strict=True)
    ]


def _value(run: RunRecord, key: str) -> str:
    value = setting(run, key)[1]
    return "-" if value is None else _shorten(value)


def _shorten(value: Any) -> str:
    text = "null" if value is None else str(value)
    text = text.lower() if isinstance(value, bool) else text
    return text if len(text) <= 40 else f"...{text[-37:]}"


def _one_per_seed(runs: Sequence[RunRecord], notes: list[str]) -> list[RunRecord]:
    """Keep the latest run per seed, since repeats would reduce the deviation."""
    latest: dict[Any, RunRecord] = {}
    for run in runs:  # sorted by folder name, which is the time
        older = latest.get(run.config["seed"])
        if older is not None:
            notes.append(
                f"{older.folder} is left out: {run.folder.name} is a later run of the same "
                f"settings and seed {run.config['seed']}"
            )
        latest[run.config["seed"]] = run
    return list(latest.values())


def _describe_differences(rows: Sequence[Row], free_keys: Sequence[str], notes: list[str]) -> None:
    """Name the differences between rows with equal labels, which were not averaged."""
    labels: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        labels.setdefault(row.label, []).append(row)
    for label, group in labels.items():
        if len(group) == 1:
            continue
        settings = [identity(row.first, free_keys) for row in group]
        keys = sorted({key for item in settings for key in item})
        differ = [key for key in keys if len({json.dumps(item.get(key)) for item in settings}) > 1]
        if len(differ) > 1:  # follows from the others
            differ = [key for key in differ if key != "parameters"]
        words = differ[:3]
        for key in differ[3:]:  # until no two rows have one label
            if _count_labels(settings, words) < _count_labels(settings, [*words, key]):
                words.append(key)
        for row, item in zip(group, settings, strict=True):
            changes = [f"{key}={_shorten(item.get(key, COUNTED.get(key)))}" for key in words]
            more = [f"and {len(differ) - len(words)} more"] if differ[len(words) :] else []
            row.settings = " ".join([*changes, *more])
        notes.append(
            f"{' '.join(label)}: {sum(len(row.runs) for row in group)} runs are not averaged "
            f"together, they differ in {', '.join(differ[:8])}{' and more' * (len(differ) > 8)}"
        )


def _count_labels(settings: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> int:
    """Return the number of different rows by the values of some keys."""
    return len({json.dumps([row.get(key) for key in keys]) for row in settings})


def _name_counted(row: Row) -> None:
    for key, usual in COUNTED.items():
        value = row.first.config.get(key, usual)
        if value != usual and key not in row.settings:
            row.settings = f"{key}={_shorten(value)} {row.settings}".strip()


def _average(row: Row, notes: list[str]) -> None:
    names = dict.fromkeys(name for run in row.runs for name in run.metrics)
    for name in names:
        values = [run.metrics[name] for run in row.runs if name in run.metrics]
        if len(values) < len(row.runs):
            notes.append(
                f"{row.name} lacks {name}: {len(row.runs) - len(values)} of its "
                f"{len(row.runs)} runs lack it"
            )
            continue
        row.mean[name] = statistics.fmean(values)
        row.deviation[name] = statistics.stdev(values) if len(values) > 1 else None


def chosen_metrics(rows: Sequence[Row], task: str, requested: str) -> list[str]:
    """Return the metrics of a table: the requested ones, or the task's default.

    Raises:
        ValueError: The runs share no metric.
    """
    names = list(dict.fromkeys(name for row in rows for name in row.mean))
    if not names:
        raise ValueError(f"the runs of task={task} that share a row must share a metric")
    family = families().get(task)
    usual = family.table_metric if family else names[0]
    return requested.split(",") if requested else [usual if usual in names else names[0]]


def refuse_unknown_metrics(runs: Sequence[RunRecord], requested: str) -> None:
    """Check that each requested metric exists in at least one run; other tables show "-".

    Raises:
        ValueError: No run has a metric.
    """
    names = list(dict.fromkeys(name for run in runs for name in run.metrics))
    tasks = ", ".join(sorted({run.task for run in runs}))
    for name in requested.split(",") if requested else ():
        if name not in names:
            raise ValueError(
                f"no run of task={tasks} has a metric {name!r}; known: {listed(names)}"
            )


def metric_direction(task: str, metric: str) -> Direction:
    """Return "max" or "min" for a metric of a task; "max" for a task of another checkout."""
    family = families().get(task)
    return family.direction(metric) if family else "max"


def pareto(points: Sequence[tuple[float, float]], direction: Direction) -> list[int]:
    """Return the indices of the Pareto-optimal points, by rising cost.

    Args:
        points: (cost, metric); a low cost is better.
        direction: "max" if a high metric is better.
    """
    sign = 1 if direction == "max" else -1
    best, front = -math.inf, []
    for index in sorted(range(len(points)), key=lambda i: (points[i][0], -sign * points[i][1])):
        if sign * points[index][1] > best:
            best = sign * points[index][1]
            front.append(index)
    return front


def record(row: Row, by: Sequence[str], metrics: Sequence[str]) -> Mapping[str, Any]:
    """Return a row as a record for ``tools.cli.tables``."""
    first = row.first
    size = first.summary.get("macs_at", (None, None))
    figures: dict[str, Any] = {"task": first.task}
    figures |= dict(zip(by, row.label, strict=True))
    figures |= {"settings": row.settings, "runs": len(row.runs)}
    for name in metrics:
        figures |= {name: row.mean.get(name), f"{name}_std": row.deviation.get(name)}
        paper = row.paper.metrics.get(name) if row.paper else None
        difference = row.mean[name] - paper if paper is not None and name in row.mean else None
        figures |= {f"{name}_paper": paper, f"{name}_difference": difference}
    return figures | {
        "paper": str(row.paper) if row.paper else None,
        "parameters_m": row.average("parameters") / 1e6,
        "backbone_macs_g": row.average("backbone_macs") / 1e9,
        "image_size": "x".join(map(str, size)),
        "seconds": row.average("seconds"),
        "terms": row.terms or None,
        "model": first.config.get(MODEL),
        "folder": _folder(row),
    }


def _folder(row: Row) -> str:
    """Return the folder of a row's last run, as typed from here, and the number of others."""
    folder = row.runs[-1].folder
    path = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    return f"{path} and {len(row.runs) - 1} more" if len(row.runs) > 1 else str(path)
