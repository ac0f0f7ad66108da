"""Cells of a plan before its first run: which mixers fit, what they cost, how they differ."""

from __future__ import annotations

import logging
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.engine.optimisation.automatic import auto_keys, steps_per_epoch
from tasks.engine.run_folder.run_config import RunConfig
from tools.cli.grammar import format_value
from tools.comparison.plan import Entry, Plan
from tools.config.config_checks import resolve_config
from tools.config.overrides import read_command
from tools.config.run_config import job_config
from tools.runs.components import Components, build_components, check_config, read_data

WARM_UPS, TIMED = 1, 2  # steps per network
ROUNDS, BATCH = 10, 16  # forward passes that are timed, and the images of a throughput
# Facts in summary.json's ``network`` that a mixer may force to differ, and their names.
TERMS = {"class_tokens": "class tokens", "pooling": "pooling", "norms": "norms"}
# The count of a network that a budget makes equal.
MATCHED = {"macs": ("backbone_macs", "multiply-adds"), "params": ("parameters", "parameters")}
MATCH_TOLERANCE = 0.02  # twice that of ``backbone.mixer.match``, as the baseline is matched, too


@dataclass(frozen=True)
class Network:
    """A mixer in a cell, as measured.

    Attributes:
        parameters: Of the whole model.
        backbone_macs: Multiply-adds of the backbone for one input.
        step: Seconds of a training step.
        busy: Its seconds of the processors, or of the GPU.
        latency: Milliseconds of a forward pass of one input; None where inputs are unknown.
        throughput: Inputs per second in batches.
        steps: Optimiser steps of a run.
        terms: Facts of the host that a mixer may force to differ.
        answers: Fingerprint of the code.
        ratios: ``latency`` and ``throughput`` over the baseline's, medians of rounds side by side.
    """

    parameters: int
    backbone_macs: float
    step: float
    busy: float
    latency: float | None
    throughput: float | None
    steps: int
    terms: dict[str, Any]
    answers: dict[str, list[float]]
    ratios: dict[str, float] = field(default_factory=dict)


@dataclass
class CellPlan:
    """A host on a data set.

    Attributes:
        host: Its label.
        data: Label of the data set.
        words: Words that make open settings equal for all mixers.
        rate: Learning rate of the recipe; None without one to set.
        prints: Fingerprints of targets, training and validation data.
        samples: Samples per split.
        networks: By mixer.
        refused: Why a mixer does not fit, by mixer.
    """

    host: str
    data: str
    words: list[str] = field(default_factory=list)
    rate: float | None = None
    prints: dict[str, str | None] = field(default_factory=dict)
    samples: dict[str, int] = field(default_factory=dict)
    networks: dict[str, Network] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str]:
        """Return host and data set."""
        return self.host, self.data

    def differing(self, mixer: str, plan: Plan) -> list[str]:
        """Describe what a mixer forces to differ from the baseline besides itself."""
        network, reference = self.networks[mixer], self.networks[plan.baseline]
        ours, reference_terms = network.terms, reference.terms
        differing = [
            f"{TERMS[key]} {term_text(ours.get(key))} instead of "
            f"{term_text(reference_terms.get(key))}"
            for key in TERMS
            if ours.get(key) != reference_terms.get(key)
        ]
        name, unit = MATCHED.get(plan.budget, (None, ""))
        ratio = getattr(network, name) / getattr(reference, name) if name else 1.0
        if abs(ratio - 1) > MATCH_TOLERANCE:
            differing.append(f"{ratio:.2f} of the baseline's {unit}, despite budget={plan.budget}")
        return differing


def term_text(value: Any) -> str:
    """Return the text of a term."""
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def run_words(plan: Plan, host: Entry, data: Entry, mixer: Entry) -> list[str]:
    """Return the words of a mixer's runs in a cell, without rate, seed and folder."""
    words = [f"task={plan.task}", *data.words, *host.words, *mixer.words, *plan.options]
    return [*words, "start=host", "checkpoints=last", "callbacks.early_stopping.patience=null"]


def compose_run(words: Sequence[str]) -> RunConfig:
    """Return the checked config of a run.

    Raises:
        ValueError: A word is wrong, or its values contradict each other.
    """
    command = read_command(words)
    return check_config(resolve_config(job_config(command.words, command.config)))


def measure_cell(plan: Plan, host: Entry, data: Entry, mixers: Sequence[Entry]) -> CellPlan:
    """Build every mixer of a cell once, time two steps of it, and read the data once.

    Raises:
        ValueError: The baseline does not fit, or the data cannot be read.
    """
    cell = CellPlan(host.label, data.label)
    baseline = next(entry for entry in mixers if entry.label == plan.baseline)
    with tempfile.TemporaryDirectory() as folder, _quiet():
        config = compose_run(run_words(plan, host, data, baseline))
        _check_rates(plan, config, data.label)
        auto = auto_keys(config)
        parts = build_components(config, Path(folder), resumed=False)
        _fix_settings(cell, config, auto, parts)
        reference: Any = None
        for mixer in [baseline, *(entry for entry in mixers if entry is not baseline)]:
            if mixer.words == baseline.words and mixer is not baseline:
                cell.networks[mixer.label] = cell.networks[baseline.label]
                continue
            try:
                words = [*run_words(plan, host, data, mixer), *cell.words]
                ours = config if mixer is baseline else compose_run(words)
                task = parts.task if mixer is baseline else _build_task(ours, parts)
                reference = reference or task
                cell.networks[mixer.label] = _measure(plan, ours, parts, task, reference, cell)
            except (ValueError, RuntimeError) as error:
                if mixer is baseline:
                    raise ValueError(str(error)) from error
                cell.refused[mixer.label] = str(error)
        _release(parts.engine.strategy.root_device)
    return cell


def _check_rates(plan: Plan, config: RunConfig, data: str) -> None:
    """Raise ValueError if rates are to be chosen on data that cannot be divided."""
    if plan.chooses_rates(data):
        try:
            read_data(config.model_copy(update={"held_out": plan.held_out}))
        except ValueError as error:
            reason = str(error).removesuffix("; leave it out")
            raise ValueError(f"{reason}; pass rates=1") from None


def note_data(plan: Plan, host: Entry, data: Entry, cell: CellPlan) -> None:
    """Note the data of a cell that was measured before, which may have changed since.

    Raises:
        ValueError: The data cannot be read, or divided to choose rates.
    """
    with _quiet():
        config = compose_run(run_words(plan, host, data, Entry("", ())))
        _check_rates(plan, config, data.label)
        _note_prints(cell, read_data(config))


def _release(device: Any) -> None:
    """Return a GPU's cached memory, which the runs need."""
    import torch

    if device.type == "cuda":
        torch.cuda.empty_cache()


def _build_task(config: RunConfig, parts: Components) -> Any:
    from tasks.engine.loading import build_backbone, build_task

    backbone = build_backbone(config, parts.datamodule)
    task = build_task(config, parts.datamodule, backbone)
    task.prepare_training(parts.datamodule)
    return task.to(parts.engine.strategy.root_device)


def _fix_settings(
    cell: CellPlan, config: RunConfig, auto: Sequence[str], parts: Components
) -> None:
    """Note the data of a cell, and the words that state what the data decided for the baseline."""
    _note_prints(cell, parts.datamodule)
    rate = config.optimizer.get("lr")
    cell.rate = float(rate) if isinstance(rate, int | float) else None
    for key in auto:
        group, _, name = key.partition(".")
        cell.words.append(f"{key}={format_value(getattr(config, group).get(name))}")


def _note_prints(cell: CellPlan, datamodule: Any) -> None:
    from tools.runs.fingerprints import fingerprints, split_fingerprint, training_fingerprints

    cell.prints = {**fingerprints(datamodule), **training_fingerprints(datamodule)}
    cell.prints["test"] = split_fingerprint(datamodule, "test")
    cell.samples = {name: int(size) for name, size in datamodule.sizes().items()}


def _measure(
    plan: Plan, config: RunConfig, parts: Components, task: Any, reference: Any, cell: CellPlan
) -> Network:
    from tools.runs.report import initial_facts, input_shape

    facts = initial_facts(config, task.model, input_shape(config, parts.datamodule))
    prints: dict[str, Any] = task.fingerprint
    answers: dict[str, list[float]] = next((entry["answers"] for entry in prints.values()), {})
    step, busy = _time_step(task, parts)
    latency, throughput, ratios = _time_forward(plan, config, parts, task, reference)
    base = cell.networks.get(plan.baseline)
    if base and base.latency and base.throughput:  # not of another second, which may be busier
        latency, throughput = (
            base.latency * ratios["latency"], base.throughput * ratios["throughput"]
        )  # fmt: skip
    per_epoch = steps_per_epoch(config.trainer, parts.datamodule.batches("train", 1))
    epochs, most = config.trainer["max_epochs"], config.trainer["max_steps"]
    steps = epochs * per_epoch if epochs > 0 else most
    steps = min(steps, most) if most > 0 else steps
    if plan.budget == "seconds" and base:
        steps = max(1, round(base.steps * base.busy / busy))
    network = facts["network"] | {"pooling": facts["pooling"]}
    return Network(
        parameters=facts["parameters"], backbone_macs=facts["backbone_macs"], step=step, busy=busy,
        latency=latency, throughput=throughput, steps=steps,
        terms={key: network.get(key) for key in TERMS}, answers=answers, ratios=ratios,
    )  # fmt: skip


def _time_step(task: Any, parts: Components) -> tuple[float, float]:
    """Return seconds and busy seconds of a training step, the fastest of two after a first one."""
    import torch

    device = parts.engine.strategy.root_device
    task.to(device).train()
    loader = iter(parts.datamodule.train_dataloader())
    batch = task.move_batch(parts.datamodule.normalise(next(loader)))
    batch = task.prepare_batch(batch)
    seconds = []
    for _ in range(WARM_UPS + TIMED):
        started, began = time.perf_counter(), time.process_time()
        losses = task.model.loss(batch)
        total = torch.stack([loss for name, loss in losses.items() if "loss" in name]).sum()
        task.zero_grad()
        total.backward()
        _synchronise(device)
        wall, processor = time.perf_counter() - started, time.process_time() - began
        seconds.append((wall, wall if device.type == "cuda" else processor))
    walls, busy = zip(*seconds[WARM_UPS:], strict=True)
    return min(walls), min(busy)


def _synchronise(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _time_forward(
    plan: Plan, config: RunConfig, parts: Components, task: Any, reference: Any
) -> tuple[float | None, float | None, dict[str, float]]:
    """Return milliseconds of one input, inputs per second, and both over the baseline's."""
    import torch

    from tools.bench.timed_networks import example_input
    from tools.bench.timing import interleave, make_step
    from tools.runs.report import input_shape

    if plan.family.counted is None:
        return None, None, {}
    device, shape = parts.engine.strategy.root_device, input_shape(config, parts.datamodule)
    figures, ratios = [], []
    for batch in (1, BATCH):
        inputs = example_input(plan.family, batch, shape).to(device)
        steps = [
            make_step(timed_task.model.backbone, inputs, "forward", torch.float32)
            for timed_task in (reference, task)
        ]
        base, ours = interleave(steps, ROUNDS, device.type)
        figures.append(statistics.median(ours))
        pairs = zip(ours, base, strict=True)
        ratios.append(1.0 if task is reference else statistics.median(a / b for a, b in pairs))
    slower = {"latency": ratios[0], "throughput": 1 / ratios[1]}
    return 1e3 * figures[0], BATCH / figures[1], slower


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out the log lines of networks that are built to be measured."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
