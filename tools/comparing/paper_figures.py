"""What a paper reports of a run, where a run is one that a paper reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tools.comparing.published import Row, list_papers, load_rows
from tools.running.folder import flatten, may_differ

if TYPE_CHECKING:
    from tools.comparing.records import RunRecord

# The data that a paper's rows of a task were measured on.
PUBLISHED_ON = {
    "classification": "datamodules.image_folder.ImageFolderDataModule",
    "transfer": "datamodules.cifar100.CIFAR100DataModule",
    "detection": "datamodules.coco.CocoDataModule",
    "segmentation": "datamodules.ade20k.ADE20KDataModule",
}
# Our names of metrics and the papers', and what theirs, in percent, are divided by.
METRICS: dict[str, tuple[str, float]] = {
    "top1": ("top1", 1), "top5": ("top5", 1), "mIoU": ("miou", 1), "mAcc": ("macc", 1),
    "mask_AP": ("ap_mask", 100), "mask_AP50": ("ap50_mask", 100), "mask_AP75": ("ap75_mask", 100),
    **{f"AP{end}": (f"ap{end}", 100) for end in ("", "50", "75", "_small", "_medium", "_large")},
}  # fmt: skip
# Besides what never matters, a run may be made on other devices than its experiment names.
DEVICES = ("devices", "num_nodes", "strategy", "precision", "sync_batchnorm", "deterministic")
MIXERS = ("mixer", "token_mixer")
FREE = {"seed", "data.root", "data.eval_batch_size", *(f"trainer.{name}" for name in DEVICES)}


@dataclass(frozen=True)
class Figures:
    """A row of a paper in our names and units."""

    row: Row
    metrics: Mapping[str, float]

    def __str__(self) -> str:
        """The paper's name and the number of its table."""
        return f"{self.row.paper.upper()} Table {self.row.table}"


def published_figures(run: RunRecord, notes: list[str]) -> Figures | None:
    """What the paper that ``config.paper`` names reports of a run.

    Args:
        run: A finished run; one on sample data is none that a paper reports.
        notes: Gets the reason where a run names a row and is another one.
    """
    claimed = {key: run.config.get(f"paper.{key}") for key in ("name", "table", "experiment")}
    real = PUBLISHED_ON.get(run.task) == run.config.get("data._target_")
    if claimed["name"] is None or not real:
        return None
    rows = [row for row in _rows(str(claimed["name"]), run) if row.table == claimed["table"]]
    what = f"{run.folder}: not compared with {claimed['name']}, Table {claimed['table']}"
    if not rows:
        notes.append(f"{what}: it has no row of this backbone and task")
        return None
    row = rows[0]
    other = _differences(run, row, claimed["experiment"])
    if other:
        notes.append(f"{what}: {'; '.join(other[:4])}{'; ...' * (len(other) > 4)}")
        return None
    return Figures(row, _metrics(row, run))


def points(runs: Sequence[RunRecord], metric: str, cost: str) -> list[tuple[str, float, float]]:
    """Name, cost and metric that papers report of the backbones of runs, where the data is theirs.

    Args:
        runs: Of one task.
        metric: Our name of it.
        cost: "params" or "flops", in M and G as the papers print them.
    """
    found: dict[tuple[str, float, float], set[str]] = {}  # papers print each other's rows
    for run in runs:
        if PUBLISHED_ON.get(run.task) != run.config.get("data._target_"):
            continue
        for paper in list_papers():
            for row in _rows(paper, run):
                value = _metrics(row, run).get(metric)
                if value is not None and cost in row.reported:
                    point = (row.backbone, row.reported[cost], value)
                    found.setdefault(point, set()).add(paper.upper())
    return [(f"{name} ({', '.join(sorted(who))})", x, y) for (name, x, y), who in found.items()]


def _rows(paper: str, run: RunRecord) -> list[Row]:
    """Rows of a paper with the backbone, task, head and options of a run."""
    if paper not in list_papers():
        return []
    chosen = [
        row
        for row in load_rows(paper, run.task)
        if row.backbone == run.config["backbone.name"]
        and row.head in (None, run.config.get("head.name"))
        and row.image_size in (224, run.config.get("data.image_size"))
    ]
    return [row for row in chosen if _has_options(run, row)]


def _has_options(run: RunRecord, row: Row) -> bool:
    """Whether a run's mixers and other options are the row's, which are the usual ones or named."""
    from backbones import backbone_schema

    usual = flatten(dict(backbone_schema(row.backbone)))
    named = flatten(dict(row.options)) if row.options else {}
    named.pop("fused", None)  # papers count and time the fused form, which is never trained
    mixers = {key: value for key, value in usual.items() if key.split(".")[0] in MIXERS}
    return all(
        run.config.get(f"backbone.{key}") == value for key, value in (mixers | named).items()
    )


def _metrics(row: Row, run: RunRecord) -> dict[str, float]:
    found = {
        ours: row.metrics[theirs] / scale
        for ours, (theirs, scale) in METRICS.items()
        if theirs in row.metrics
    }
    probed = f"top1_{run.config.get('protocol')}"
    return found | ({"top1": row.metrics[probed]} if probed in row.metrics else {})


def _differences(run: RunRecord, row: Row, experiment: Any) -> list[str]:
    """What a run has otherwise than the published one."""
    if run.task != "transfer" and not row.options.get("fused"):
        parameters = run.summary["parameters"]
        if parameters != row.params:
            return [f"{parameters} parameters instead of {row.params}, so another model or classes"]
    if experiment is None:
        return []
    from omegaconf import OmegaConf

    from tools.command_line.backbone_group import register
    from tools.running.config import compose_config

    register()

    meant = OmegaConf.to_container(compose_config([f"experiment={experiment}"]), resolve=True)
    return [
        f"{key}={run.config[key]} instead of {value}"
        for key, value in flatten(meant).items()
        if key in run.config and key not in FREE and not may_differ(key)
        and (run.config[key] or None) != (value or None)
    ]  # fmt: skip
