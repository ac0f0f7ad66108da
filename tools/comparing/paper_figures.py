"""Find the published figures of a run, and compare them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tasks.engine.family import Published, families, find_family
from tasks.engine.run_folder.run_config import RunConfig
from tasks.engine.run_folder.saved_runs import IDENTITY, open_saved
from tools.cli.nested_config import flatten
from tools.comparing.run_records import RunRecord
from tools.papers.experiments import experiments
from tools.papers.published import Row, list_papers, load_rows
from tools.papers.recipes import REQUIRED
from tools.runs.default_values import TOKEN_MIXER
from tools.runs.folder import may_differ

SAMPLE = "datamodules.sample."

# Options of the data of an evaluation on several sets that must equal the row's.
ON_SETS = ("_target_", "root", "roots", "sets", "published_counts", "image_size")
# Options of devices, in which a run may differ from its experiment.
DEVICES = (
    "devices", "num_nodes", "strategy", "precision", "sync_batchnorm", "deterministic", "compile",
    "channels_last", "tf32",
)  # fmt: skip
MIXERS = ("mixer", "token_mixer")
FREE = {
    "seed",
    "mode",
    "data.root",
    "data.class_order",  # ImageNet's folders have the same order in both
    "data.eval_batch_size",
    *(f"trainer.{name}" for name in DEVICES),
}


@dataclass(frozen=True)
class Figures:
    """A paper's row in our names and units."""

    row: Row
    metrics: Mapping[str, float]

    def __str__(self) -> str:
        """Format the paper's name and table."""
        return f"{self.row.paper.upper()} Table {self.row.table}"


def published_figures(run: RunRecord, notes: list[str]) -> Figures | None:
    """Return the figures that the paper named in ``config.paper`` reports of a run.

    Args:
        run: A finished run; on other data than the paper's it gives None.
        notes: Gets the reason if a run names a row but differs from it.
    """
    name, table = run.config.get("paper.name"), run.config.get("paper.table")
    target = data_set(run.config.get("data._target_"))
    if name is None:
        return None
    start = f"{run.folder}: not compared with {name}, Table {table}"
    if not _is_published_data(run):
        source = "sample data" if str(target).startswith(SAMPLE) else str(target).rpartition(".")[2]
        notes.append(f"{start}: made on {source}, not on the paper's data")
        return None
    if run.host is None:
        notes.append(f"{start}: backbone {run.config['backbone.name']} is not in this checkout")
        return None
    row = _claimed(run)
    if row is None:
        notes.append(f"{start}: the paper lacks a row of this backbone and task")
        return None
    if target != published_test_set(row)[0]:
        return None
    reasons = _differences(run, row)
    reasons = _other_figures(row) or reasons
    if reasons:
        notes.append(f"{start}: {_few(reasons)}")
        return None
    return Figures(row, _metrics(row, run))


def compare_with_row(config: RunConfig, summary: Mapping[str, Any]) -> dict[str, Any] | None:
    """Compare a run or evaluation that ends now with the paper's row that it claims to reproduce.

    On robustness sets a network needs no claim: the first row that reports it is used.

    Args:
        config: Of the command; an evaluation reads the training's settings from the run folder of
            its checkpoint.
        summary: Content of summary.json.

    Returns:
        None without a claim, else ``row``, ``experiment`` and ``metrics`` by our names: for each
        ``paper``, ``ours`` and, if they are comparable, ``difference``; otherwise ``why_not``.
    """
    evaluates = config.mode != "fit"
    on_sets = evaluates and _is_suite(config.task_name, config.data["_target_"])
    if not (config.paper or {}).get("name") and not on_sets:
        return None
    trained = open_saved(config.ckpt).run if evaluates and config.ckpt else None
    settings = config.plain() if trained is None else {**trained.config, "paper": config.paper}
    settings |= {group: getattr(config, group) for group in IDENTITY} | {"mode": config.mode}
    if trained is not None:
        start = trained.config["backbone"].get("pretrained")
        settings["backbone"] = {**config.backbone, "pretrained": start}
    groups = tuple(IDENTITY) if evaluates and trained is None else None
    if on_sets:
        data = trained.config["data"] if trained is not None else {}
        settings["data"] = {
            **data,
            **{key: config.data[key] for key in ON_SETS if key in config.data},
        }
    run = RunRecord(Path(), "finished", "", flatten(settings), summary, summary["metrics"])
    row = _claimed(run)
    if on_sets and (row is None or not _figures_on_sets(run.task) & row.metrics.keys()):
        row = _find_robustness_row(run)
        if row is not None:
            run = replace(run, config={**run.config, "paper.experiment": row.name})
            groups = (
                () if trained is None else None
            )  # the training of a foreign checkpoint is unknown
    reasons: list[str] = []
    if row is None and not on_sets:
        row, reasons = _renamed_row(run)
    if row is None:
        return None
    why_not = reasons or _other_figures(row) or _other_data(run, row)
    why_not = why_not or _differences(run, row, groups)
    figures = _metrics(row, run)
    metrics = {}
    for name, value in figures.items():
        ours = summary["metrics"].get(name)
        metrics[name] = {"paper": value, "ours": ours}
        if ours is not None and not why_not:
            metrics[name]["difference"] = ours - value
    comparison = {"row": str(Figures(row, figures)), "experiment": row.name, "metrics": metrics}
    return comparison | ({"why_not": _few(why_not)} if why_not else {})


def published_test_set(row: Row) -> tuple[str, int]:
    """Return the data module that a row was measured on, and its number of test examples."""
    published = _published(row.task)
    return published.also.get(row.train.data, (published.data, published.examples))


def _published(task: str) -> Published:
    published = find_family(task).published
    assert published is not None, f"rows of {task} need its FAMILY.published"
    return published


def data_set(target: object) -> str:
    """Return the data module that represents a dataset, whatever its file format."""
    published = filter(None, (family.published for family in families().values()))
    return next((entry.data for entry in published if target in entry.containers), str(target))


def _is_suite(task: str, target: object) -> bool:
    """Return True for the data module of several test sets at once."""
    published = find_family(task).published
    return published is not None and bool(target) and target == published.suite


def _figures_on_sets(task: str) -> set[str]:
    """Return the metrics that a suite of test sets gives besides the usual one."""
    family = find_family(task)
    return {metric.name for metric in family.metrics if metric.data_set} - {family.table_metric}


def _is_published_data(run: RunRecord) -> bool:
    """Return True if a run was tested on a dataset of the paper's rows with all its examples."""
    family = families().get(run.task)
    if family is None or family.published is None:
        return False
    published = family.published
    counts = {**dict(published.also.values()), published.data: published.examples}
    target = data_set(run.config.get("data._target_"))
    images = run.summary.get("data", {}).get("samples", {}).get("val")
    return target in counts and images in (None, counts[target])


def _few(reasons: Sequence[str]) -> str:
    return f"{'; '.join(reasons[:4])}{'; ...' * (len(reasons) > 4)}"


def points(runs: Sequence[RunRecord], metric: str, cost: str) -> list[tuple[str, float, float]]:
    """Return name, cost and metric of the papers' points for the backbones of runs on their data.

    Args:
        runs: Runs of one task.
        metric: Our name of it.
        cost: "params" or "flops", in M and G as the papers print them.
    """
    spots: dict[tuple[str, float, float], set[str]] = {}  # papers print each other's rows
    for run in runs:
        if not _is_published_data(run):
            continue
        for paper in list_papers():
            for row in _rows(paper, run):
                value = _metrics(row, run).get(metric)
                fits = published_test_set(row)[0] == data_set(run.config.get("data._target_"))
                if fits and value is not None and cost in row.reported:
                    point = (row.backbone, row.reported[cost], value)
                    spots.setdefault(point, set()).add(paper.upper())
    return [(f"{name} ({', '.join(sorted(who))})", x, y) for (name, x, y), who in spots.items()]


def _rows(paper: str, run: RunRecord) -> list[Row]:
    """Return the rows of a paper with the backbone, task, head and options of a run."""
    if paper not in list_papers() or run.host is None:  # its default options are unknown
        return []
    rows = [
        row
        for row in load_rows(paper, run.task)
        if row.backbone == run.config["backbone.name"]
        and row.head in (None, run.config.get("head.name"))
        and (
            not _is_published_data(run)
            or published_test_set(row)[0] == data_set(run.config["data._target_"])
        )
        and row.image_size in (224, run.config.get("data.image_size"))
    ]
    return [row for row in rows if _has_options(run, row)]


def _has_options(run: RunRecord, row: Row) -> bool:
    """Return True if a run's mixers and other options are the row's, named or default."""
    from backbones import backbone_schema

    usual = flatten(dict(backbone_schema(row.backbone)))
    row_options = flatten(dict(row.options)) if row.options else {}
    row_options.pop("fused", None)  # papers count the fused form, which is never trained
    token = row_options.pop("token_mixer", None)
    if token is not None:
        row_options["token_mixer.name"] = token
    if usual.pop("token_mixer", "") is None and f"{TOKEN_MIXER}.name" in run.config:
        row_options.setdefault("token_mixer.name", None)
    if isinstance(run.config.get(TOKEN_MIXER), list):  # no paper's row has one mixer per stage
        return False
    mixers = {key: value for key, value in usual.items() if key.split(".")[0] in MIXERS}
    return all(
        run.config.get(f"backbone.{key}") == value for key, value in (mixers | row_options).items()
    )


def _metrics(row: Row, run: RunRecord) -> dict[str, float]:
    """Return the row's metrics that the run's data can give, by our names."""
    family = find_family(run.task)
    on_sets = _is_suite(run.task, run.config.get("data._target_"))
    # Elsewhere the run has one set, which gives the usual metric.
    sets = run.config["data.sets"] if on_sets else [family.metric(family.table_metric).data_set]
    metrics = {
        metric.name: row.metrics[metric.published] / metric.scale
        for metric in family.metrics
        if metric.published in row.metrics and (metric.data_set or sets[0]) in sets
    }
    probed = f"top1_{run.config.get('protocol')}"
    return metrics | ({"top1": row.metrics[probed]} if probed in row.metrics else {})


def _claimed(run: RunRecord) -> Row | None:
    """Return the row that a run claims, by its name, or else by paper and table."""
    experiment = run.config.get("paper.experiment")
    if experiment is not None:
        row = experiments().get(str(experiment))
        is_same_network = row is not None and (row.task, row.backbone) == (
            run.task,
            run.config["backbone.name"],
        )
        return row if is_same_network else None
    rows = _rows(str(run.config.get("paper.name")), run)
    return next((row for row in rows if row.table == run.config.get("paper.table")), None)


def _renamed_row(run: RunRecord) -> tuple[Row | None, list[str]]:
    """Return the row that a run names but with another task or backbone, and the difference."""
    row = experiments().get(str(run.config.get("paper.experiment")))
    if row is None:
        return None, []
    settings = {"task": run.task, "backbone": run.config["backbone.name"]}
    row_settings = {"task": row.task, "backbone": row.backbone}
    return row, [
        f"{key}={settings[key]} instead of {row_settings[key]}"
        for key in settings
        if settings[key] != row_settings[key]
    ]


def _find_robustness_row(run: RunRecord) -> Row | None:
    """Return the first row of any paper that reports robustness of a run's network."""
    rows = [row for paper in list_papers() for row in _rows(paper, run)]
    figures = _figures_on_sets(run.task)
    return next((row for row in rows if row.name and figures & row.metrics.keys()), None)


def _other_figures(row: Row) -> list[str]:
    """Return why one run cannot give a row's figures."""
    if row.quoted:
        return [f"the paper quotes these figures from {row.quoted}"]
    family = find_family(row.task)
    if family.published and family.published.incomparable:
        return [family.published.incomparable]
    if not family.averaged_values:
        return []
    values = ",".join(map(str, family.averaged_values))
    sets = f" data={','.join(row.train.also)}" if row.train.also else ""
    return [f"the paper's figures are averages; pass --multirun{sets} {family.averaged}={values}"]


def _other_data(run: RunRecord, row: Row) -> list[str]:
    """Return why a run's test images are not the paper's."""
    from datamodules.files.cache import cache_root  # imports torch, which tables do not need

    target = str(run.config.get("data._target_"))
    root = run.config.get("data.root")
    inside = root is not None and Path(str(root)).absolute().is_relative_to(cache_root().absolute())
    if target.startswith(SAMPLE) or inside:
        return ["trained on sample data; not comparable with the paper"]
    if _is_suite(run.task, target):
        return _other_sets(run)
    test_set, count = published_test_set(row)
    if data_set(target) != test_set:
        return [f"made on {target.rpartition('.')[2]}, not on the paper's data"]
    images = run.summary.get("data", {}).get("samples", {}).get("val")
    if images not in (None, count):
        unit = find_family(run.task).unit
        return [f"{images} test {unit} instead of {count}, so the data differs"]
    return []


def _other_sets(run: RunRecord) -> list[str]:
    """Return why robustness sets are not the published ones."""
    from datamodules.corruptions.copies import NOTE
    from datamodules.images.robustness_sets import locate_set

    if not run.config["data.published_counts"]:
        return ["data.published_counts=false: not the published sets"]
    sets, root = run.config["data.sets"], run.config["data.root"]
    if "imagenet_c" not in sets:
        return []
    path = run.config.get("data.roots.imagenet_c")
    folder = locate_set(
        "imagenet_c", None if root is None else Path(root), path, may_be_root=len(sets) == 1
    )
    if folder is not None and (folder / NOTE).is_file():
        return ["imagenet_c is a copy made by tools/corrupt.py"]
    return []


def _differences(run: RunRecord, row: Row, groups: Sequence[str] | None = None) -> list[str]:
    """Return how a run differs from the published one; with ``groups``, in these only."""
    if _published(run.task).fixed_parameters and not row.options.get("fused"):
        parameters = run.summary["parameters"]
        if parameters != row.params:
            return [
                f"{parameters} parameters instead of {row.params}, so the model or classes differ"
            ]
    skipped = (run.summary.get("data") or {}).get("left_out")
    if skipped:
        return [f"evaluated without {skipped}"]
    experiment = run.config.get("paper.experiment")
    if experiment is None:
        return []
    from omegaconf import OmegaConf

    from tasks.engine.optimisation.automatic import apply_fixed_schedule
    from tools.config.lazy_groups import register_groups
    from tools.config.run_config import compose_config

    register_groups()

    # Settings that the paper leaves open are those of the run.
    words = [
        f"{key}={run.config[key]}"
        for key in row.train.needs
        if "." in key and run.config.get(key) is not None
    ]
    composed: Any = OmegaConf.to_container(
        compose_config([f"experiment={experiment}", *words]), resolve=True
    )
    composed.pop("recipe", None)
    row_settings = apply_fixed_schedule(RunConfig(**composed)).plain()
    free_keys = FREE | ({"backbone.pretrained"} if row.train.start or groups else set())
    target = run.config.get("data._target_")
    if _is_suite(run.task, target) or data_set(target) == published_test_set(row)[0]:
        free_keys |= {"data._target_"}
    differ = [
        f"{key}={run.config[key]} instead of {value}"
        for key, value in flatten(row_settings).items()
        if key in run.config and key not in free_keys and not may_differ(key)
        and not (value == REQUIRED and run.config[key])
        and (groups is None or key.partition(".")[0] in groups)
        and (run.config[key] or None) != (value or None)
    ]  # fmt: skip
    if row.train.start and groups is None and not run.config.get("backbone.pretrained"):
        differ.insert(0, "trained from random weights")
    if row.train.cannot_run and groups is None:
        differ.insert(0, row.train.cannot_run.partition(";")[0])
    return differ
