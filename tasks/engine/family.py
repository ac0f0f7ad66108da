"""Task families: one object per folder of ``tasks/`` that describes it.

A family is a folder with ``family.py``. Commands, engine and data modules read its ``FAMILY``.
Importing it is cheap: functions are named. A dotted name is imported, see ``imported``; a name
without dots is one of the functions that the command itself offers to all families.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal

from backbones.options.suggestions import plural
from tasks.engine.optimisation.schedule_rule import ScheduleRule

PACKAGE = Path(__file__).resolve().parents[1]
ANY = "*"  # key of ``analyses`` or ``exports`` for all others
Direction = Literal["max", "min"]


@dataclass(frozen=True)
class Metric:
    """Metric of a family's runs.

    Attributes:
        name: Name in summary.json and, after "val/", in metrics.csv.
        title: Title of a plot's axis; the name if empty.
        direction: "max" if higher is better, "min" if lower is.
        published: Its name in configs/published; empty if absent there.
        scale: Divisor that converts the published value to our unit.
        data_set: The test set that yields it, for a family evaluated on several at once.
        lowest: Its lowest value, in our unit.
    """

    name: str
    title: str = ""
    direction: Direction = "max"
    published: str = ""
    scale: float = 1
    data_set: str = ""
    lowest: float = 0.0


@dataclass(frozen=True)
class Counted:
    """The network that tools/complexity.py counts for a family.

    Attributes:
        targets: Arguments that the head gets from the data module, such as ``num_classes``.
        head: Default file of configs/head.
        size: Default ``image_size``, for families of images.
        shape: Shape of one input without its batch, such as (C, L), for other families.
        inputs: Function (batch, shape) that returns inputs to time, on the CPU; empty for normal
            random numbers.
        parts: Function (model, size, rule) that yields name, parameters and multiply-adds of each
            part; empty to count the whole model in one pass of an input tensor.
        rows: True to count the rows of papers; False to read the counts from their YAML.
    """

    targets: Mapping[str, Any]
    head: str
    size: str = ""
    shape: tuple[int, ...] = ()
    inputs: str = ""
    parts: str = ""
    rows: bool = False


@dataclass(frozen=True)
class Published:
    """Data sets of a family's published rows, by dotted names of data modules.

    Attributes:
        data: Data module of most rows.
        examples: Number of test examples of these rows.
        also: Further data modules by ``train.data`` of the rows, with their test examples.
        containers: Data modules that read the same set as ``data`` in another format.
        suite: Data module of several test sets at once; empty if absent.
        fixed_parameters: True if a different number of parameters means a different model.
        whole_cost: True if papers report the multiply-adds of the whole model.
        incomparable: Reason why no run compares with the rows; empty if runs do.
    """

    data: str
    examples: int
    also: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    containers: tuple[str, ...] = ()
    suite: str = ""
    fixed_parameters: bool = True
    whole_cost: bool = False
    incomparable: str = ""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Description of a task family.

    Attributes:
        name: Name of the folder, of the file in configs/task, and value of ``task=``.
        task: Dotted name of its LightningModule, which evaluates, draws and writes predictions.
        modality: Kind of input, in the singular: "image". Hosts state theirs.
        unit: Unit of throughput, in the plural: "images".
        batch: Entries of a batch with their shapes, the input first.
        exact_inputs: True if batches keep their precision beside weights of another one; its models
            cast what their weights read.
        compiles: False if each input has a size of its own, for which torch.compile starts anew.
        targets: Keys of summary.json that its data modules provide about the targets.
        metrics: Its metrics, see ``metric``.
        monitor: Name of the metric that chooses the best checkpoint.
        headline: Name of the metric of tables and searches; by default ``monitor``.
        answers: Name of the metric, or loss, of which a test keeps a part per sample; empty if a
            sample has none.
        needs: Distributions that it needs besides those of every run.
        uses: Distributions for single features -> the option or device that needs each.
        started_by: Family of the trained backbones that it starts from; empty for scratch.
        rule: Schedule for options with the value ``auto``; None refuses ``auto``.
        usual_data: Function of the network's input size that returns the config of a data module,
            for prediction with a task that was trained without one; None refuses it.
        counted: Network for tools/complexity.py; None refuses the family.
        pipeline: Function that tools/benchmark.py data times; empty refuses the family.
        exports: Part of a run to export ("model", "classifier" or "backbone"), by target of
            tools/export.py; absent targets are refused.
        graph: Function (task, network, folder, label) that describes the whole network as a
            ``graphs.NetworkGraph``, for ONNX and torch.export; empty for networks of images.
        whole_graph: Class of ``graphs.WholeGraph`` that describes a run as one ONNX graph from
            inputs to answers; empty without one.
        analyses: Dotted name of the family's function, by analysis of tools/analyse.py; empty if
            the analysis needs none. Absent analyses are refused.
        peculiarity: Clause for messages that refuse an analysis or export; empty names the
            modality.
        remedies: What to type instead of a refused analysis, by its name.
        parts_evaluation: Function that evaluates data modules with several ``parts``.
        published: Published results; None without any.
        averaged: Option whose values papers average, such as data.horizon; a sweep over it prints
            the average.
        pooled: Dotted name of a function of the averaged runs' ``counts`` in summary.json, a list
            per value, that returns further figures of such a sweep; empty for none.
        averaged_values: The values that the published rows average; empty if rows are single runs.
        keeps_head: True if a training can start from neck and head of a run with other classes.
        channels_first: True if an input without its batch begins with its channels.
        prompt: What users type as an input, for families whose inputs are texts; empty for files.
        hub_task: Name of the task on the Hugging Face hub, ``pipeline_tag``; empty without one.
    """

    name: str
    task: str
    modality: str
    unit: str
    batch: Mapping[str, str]
    metrics: Sequence[Metric]
    monitor: str
    headline: str = ""
    answers: str = ""
    exact_inputs: bool = False
    compiles: bool = True
    targets: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    uses: Mapping[str, str] = field(default_factory=dict)
    started_by: str = ""
    rule: ScheduleRule | None = None
    usual_data: Callable[[Any], dict[str, Any]] | None = None
    counted: Counted | None = None
    pipeline: str = ""
    exports: Mapping[str, str] = field(default_factory=dict)
    graph: str = ""
    whole_graph: str = ""
    analyses: Mapping[str, str] = field(default_factory=dict)
    peculiarity: str = ""
    remedies: Mapping[str, str] = field(default_factory=dict)
    parts_evaluation: str = ""
    published: Published | None = None
    averaged: str = ""
    pooled: str = ""
    averaged_values: tuple[int, ...] = ()
    keeps_head: bool = False
    channels_first: bool = True
    hub_task: str = ""
    prompt: str = ""

    @property
    def table_metric(self) -> str:
        """Return the name of the metric for tables, plots and searches."""
        return self.headline or self.monitor

    def metric(self, name: str) -> Metric:
        """Return a metric by name; unlisted ones follow the monitored one, losses are minimised."""
        metrics = {metric.name: metric for metric in self.metrics}
        if name in metrics:
            return metrics[name]
        is_loss = name.rpartition("/")[2] == "loss" or name.endswith("_loss")
        return Metric(name, direction="min" if is_loss else metrics[self.monitor].direction)

    def direction(self, name: str) -> Direction:
        """Return "max" or "min" for the name of a metric."""
        return self.metric(name).direction

    def is_better(self, value: float, reference: float) -> bool:
        """Return True if a value of the monitored metric is at least as good as another one."""
        return value >= reference if self.direction(self.monitor) == "max" else value <= reference

    def export_of(self, target: str) -> str:
        """Return the part to export to a target of tools/export.py; empty if refused."""
        return self.exports.get(target, self.exports.get(ANY, ""))

    def analysis(self, name: str) -> str | None:
        """Return the family's function for an analysis; None if it does not apply."""
        return self.analyses.get(name, self.analyses.get(ANY))

    def check_host(self, host: str, modality: str, hosts: Sequence[str]) -> None:
        """Refuse a host of another modality.

        Args:
            host: Name of the backbone.
            modality: Modality that the host takes.
            hosts: Names of hosts that fit.

        Raises:
            ValueError: Names both modalities and some hosts that fit.
        """
        if modality == self.modality:
            return
        names = [*hosts[:5], *(["..."] if len(hosts) > 5 else [])]
        raise ValueError(
            f"task={self.name} takes {plural(self.modality)}, but {host} is a backbone for "
            f"{plural(modality)}; pass backbone="
            f"{', '.join(names) if names else f'<a host for {plural(self.modality)}>'}"
        )


@functools.cache
def family_modules() -> dict[str, str]:
    """Return name -> module: folders of ``tasks/`` with a ``family.py``, and entry points.

    An installed package names its module in an entry point ``mixerlab.families``.
    """
    folders = sorted(file.parent.name for file in PACKAGE.glob("*/family.py"))
    modules = {name: f"tasks.{name}.family" for name in folders if name != "engine"}
    points = {point.name: point.value for point in entry_points(group="mixerlab.families")}
    return points | modules


def families() -> dict[str, Family]:
    """Return all families by name; imports each."""
    return {name: _family(name) for name in family_modules()}


@functools.cache
def _family(name: str) -> Family:
    module = family_modules()[name]
    family: Family = importlib.import_module(module).FAMILY
    if family.name != name:
        raise ValueError(f"{module} has FAMILY.name={family.name!r}; name it {name!r}")
    return family


def find_family(name: str) -> Family:
    """Return the family of a ``task=``.

    Raises:
        ValueError: The name is unknown; the message lists the valid ones.
    """
    if not isinstance(name, str) or name not in family_modules():
        raise ValueError(f"unknown task {name!r}; known: {', '.join(family_modules())}")
    return _family(name)


def family_of_task(names: Collection[str]) -> Family | None:
    """Return the family of the first of these task classes that has one, by dotted name.

    The class of a family's task lies beside its ``family.py``.
    """
    for name in names:
        for family, module in family_modules().items():
            if name.startswith(module.removesuffix("family")) and _family(family).task == name:
                return _family(family)
    return None


def imported(name: str, room: str = "") -> Any:
    """Import the object of a dotted name; one without dots is in the module ``room``."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module or room), attribute)
