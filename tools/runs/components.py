"""The parts of a run: checked, built in the order of the data flow, and put to work."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer, seed_everything
from torch import nn

from backbones.checkpoints.opening import Checkpoint, open_checkpoint
from datamodules import BaseDataModule
from tasks.engine.base import BaseTask
from tasks.engine.compilation import check_compiler, compile_blocks
from tasks.engine.family import imported
from tasks.engine.instantiate import build
from tasks.engine.loading import build_backbone, build_task
from tasks.engine.signals import RunStopped
from tools.cli.processes import is_first_process
from tools.config import automatic
from tools.config.config_checks import check_warmup
from tools.config.training_length import OVERFIT
from tools.runs import frozen_fit, predict_mode, report, resume, trainer
from tools.runs.disk import check_space
from tools.runs.folder import mark_latest, update_config
from tools.runs.source import Source, keep_source, read_source


@dataclass(frozen=True)
class Parts:
    """What a run consists of.

    Attributes:
        datamodule: Its data.
        task: Its network, with the weights of a checkpoint where it is an evaluation.
        engine: Lightning's trainer.
        facts: What is known of the network before the run.
        code: What git says of the code; known to the first process.
        start: Of a resumed run, the checkpoint that it goes on from.
    """

    datamodule: BaseDataModule
    task: BaseTask
    engine: Trainer
    facts: dict[str, Any]
    code: Source
    start: resume.Start | None = None


def build_parts(config: dict[str, Any], folder: Path, *, resumed: bool) -> Parts:
    """Build the parts of a run.

    Args:
        config: Of the run.
        folder: Of the run.
        resumed: Whether the run in this folder is to go on.
    """
    seed_everything(config["seed"], workers=True, verbose=False)
    code = read_source() if is_first_process() else Source(None)
    training = config["mode"] == "fit"
    checkpoint = None if training else open_checkpoint(config["ckpt"])
    built = resume.without_start(config) if resumed else config
    backbone = build_backbone(built)  # refuses its options before the data are looked at
    datamodule = _data(config, checkpoint, backbone)
    task = build_task(built, datamodule, backbone)
    loaded: dict[str, Any] = {}
    if training:
        task.prepare_training(datamodule)
    if checkpoint is not None:
        task.load_weights(checkpoint)
        loaded = {"checkpoint_step": checkpoint.step}
    options, start = config["trainer"], None
    shape = report.input_shape(config, datamodule)
    if resumed:
        start = resume.find_start(folder, config["ckpt"], task, options)
    facts = report.facts(config, task.model, shape) | loaded | {"git_commit": code.commit}
    engine = trainer.make_trainer(
        options,
        folder,
        task.monitor,
        task.mode,
        training=training,
        checkpoint_every=config["checkpoint_every"],
        **(trainer.extras(config, folder, task) if training else {}),
    )
    if training and not solves(task.model):
        trainer.check_fit(engine, task, datamodule)
        if is_first_process():
            check_space(folder, task, top_k=config["callbacks"]["top_k"])
    if options.get("compile"):
        check_compiler(engine.strategy.root_device)
        compile_blocks(task.model)
    return Parts(datamodule, task, engine, facts, code, start)


def _data(config: dict[str, Any], checkpoint: Checkpoint | None, backbone: nn.Module) -> Any:
    """Build the datamodule of a run; before a training choose what is auto, and check all files."""
    known = automatic.apply_fixed_schedule(config)
    datamodule = build(known, "data", seed=config["seed"], predict_path=config["input"])
    if predict_mode.needs_no_data(config, datamodule, checkpoint):
        return datamodule
    datamodule.fixed_order = bool(config["trainer"].get(OVERFIT))
    datamodule.prepare_data()
    datamodule.setup()
    if config["mode"] == "fit":
        automatic.choose_values(config, datamodule, backbone)
        check_warmup(config["schedule"], config["trainer"])
    if config["mode"] == "fit" and is_first_process():
        datamodule.check_files()
    return datamodule


def solves(model: nn.Module) -> bool:
    """Return True for a head that is solved from features in place of a training."""
    return bool(getattr(model, "solves", False))


def work(
    parts: Parts, config: dict[str, Any], folder: Path, new_length: str | None
) -> dict[str, float]:
    """Train, evaluate or predict; the closing metrics.

    Args:
        parts: Of the run.
        config: Of the run.
        folder: Of the run.
        new_length: From ``folder.describe_new_length``.
    """
    task, datamodule, engine = parts.task, parts.datamodule, parts.engine
    if config["mode"] == "predict":
        return predict_mode.predict(engine, task, datamodule)
    if config["mode"] != "fit" and datamodule.parts:
        evaluate_parts = imported(task.family.parts_evaluation)
        return evaluate_parts(engine, task, datamodule, config, folder)
    if config["mode"] != "fit":
        return trainer.evaluate(engine, config["mode"], task, datamodule)
    mark_latest(folder)
    keep_source(folder, parts.code)
    report.announce_network(task.model.backbone, config["backbone"])
    if solves(task.model):
        return frozen_fit.solve(engine, task, datamodule, config["seed"])
    report.announce(parts.facts, config, datamodule, engine.world_size)
    if parts.start:
        resume.announce(parts.start, new_length)
        update_config(folder, config)
        report.reopen(folder)
    keep, started = config["checkpoints"], time.perf_counter()
    try:
        return trainer.fit(engine, task, datamodule, start=parts.start, keep=keep)
    except RunStopped:
        if engine.is_global_zero and engine.global_step:
            facts = parts.facts | {"seconds": round(time.perf_counter() - started, 1)}
            report.write_stopped(folder, facts, engine, task, datamodule)
        raise
