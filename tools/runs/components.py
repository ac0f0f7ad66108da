"""Components of a run: checked, built in the order of the data flow, and started."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything
from torch import nn

from backbones.checkpoints.opening import Checkpoint, open_checkpoint
from datamodules import BaseDataModule
from tasks.engine.base import BaseTask
from tasks.engine.checkpoint_entries import BUILT
from tasks.engine.compilation import check_compiler, compile_blocks
from tasks.engine.family import imported
from tasks.engine.instantiate import build
from tasks.engine.loading import build_backbone, build_task
from tasks.engine.normalisation import take_preprocessing
from tasks.engine.optim import check_optimizer
from tasks.engine.signals import RunStopped
from tools.cli.processes import is_first_process
from tools.config import automatic
from tools.config.config_checks import check_warmup
from tools.config.training_length import OVERFIT
from tools.runs import frozen_fit, predict_mode, report, resume, trainer
from tools.runs.disk import check_space
from tools.runs.folder import mark_latest, update_config
from tools.runs.logger_setup import make_loggers
from tools.runs.source import Source, keep_source, read_source
from tools.runs.untrained import evaluate_once, trains


@dataclass(frozen=True)
class Components:
    """Components of a run.

    Attributes:
        datamodule: Data of the run.
        task: Task with its network; for an evaluation with the weights of a checkpoint.
        engine: Lightning's trainer.
        facts: Facts about the network for the summary.
        code: Git's description of the code, in the first process.
        start: Checkpoint that a resumed run continues from.
    """

    datamodule: BaseDataModule
    task: BaseTask
    engine: Trainer
    facts: dict[str, Any]
    code: Source
    start: resume.Start | None = None


def build_components(config: dict[str, Any], folder: Path, *, resumed: bool) -> Components:
    """Build the components of a run.

    Args:
        config: Config of the run.
        folder: Run folder.
        resumed: Resume the run in this folder.
    """
    seed_everything(config["seed"], workers=True, verbose=False)
    code = read_source() if is_first_process() else Source(None)
    training = config["mode"] == "fit"
    trainer.check_options(automatic.apply_fixed_schedule(config)["trainer"])
    loggers = make_loggers(config["logger"], folder, config) if training else []
    checkpoint = None if training else open_checkpoint(config["ckpt"])
    start_from = resume.without_start if resumed else dict
    datamodule, without_data = _datamodule(config, checkpoint)
    # Refuses wrong options before the data are read.
    backbone = build_backbone(start_from(config), datamodule)
    foreign = checkpoint is not None and checkpoint.format is None
    if foreign or (training and not resumed):
        weights = checkpoint if foreign else config["backbone"]["pretrained"]
        augmentation = getattr(datamodule, "augmentation", None)
        line = take_preprocessing(config, augmentation, backbone, weights)
        if line is not None:
            report.log_info(line)
            datamodule, without_data = _datamodule(config, checkpoint)
    if not without_data:
        _prepare(config, datamodule, backbone)
    task = build_task(start_from(config), datamodule, backbone)
    if training:
        task.prepare_training(datamodule)
    loaded = {} if checkpoint is None else _load(task, checkpoint, config["trainer"]["precision"])
    options, start = config["trainer"], None
    shape = report.input_shape(config, datamodule)
    if resumed:
        start = resume.find_start(folder, config["ckpt"], task, options)
    facts = report.initial_facts(config, task.model, shape) | loaded | {"git_commit": code.commit}
    engine = trainer.make_trainer(
        options,
        folder,
        task.monitor,
        task.mode,
        training=training,
        checkpoint_every=config["checkpoint_every"],
        fixed_size=datamodule.fixed_size,
        callbacks=trainer.optional_callbacks(config["callbacks"], folder, task) if training else (),
        loggers=loggers,
    )
    if training and not solves(task.model) and trains(task):
        trainer.check_fit(engine, task, datamodule)
        if is_first_process():
            check_space(folder, task, top_k=config["callbacks"]["top_k"])
    if options.get("compile"):
        check_compiler(engine.strategy.root_device)
        compile_blocks(task.model)
    return Components(datamodule, task, engine, facts, code, start)


def _load(task: BaseTask, checkpoint: Checkpoint, precision: str) -> dict[str, Any]:
    """Load the weights of a checkpoint, and return the fact of its step."""
    if precision == "64-true":
        task.double()  # float32 would round the weights
    task.load_weights(checkpoint)
    return {"checkpoint_step": checkpoint.step}


def check_settings(config: dict[str, Any]) -> None:
    """Refuse a training's settings that are wrong for any data, without reading or drawing values.

    Raises:
        ValueError: A wrong setting.
    """
    chosen = {key: value for key, value in config["optimizer"].items() if value != "auto"}
    check_optimizer({"lr": 1.0, **chosen})
    datamodule, _ = _datamodule(config, None)
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        build_backbone(
            {**config, "backbone": {**config["backbone"], "pretrained": None}}, datamodule
        )


def _datamodule(config: dict[str, Any], checkpoint: Checkpoint | None) -> tuple[Any, bool]:
    """Build the datamodule; return it, and True if the run needs no data set."""
    known = automatic.apply_fixed_schedule(config)
    if checkpoint is not None:  # evaluated images are normalised as in training
        data = automatic.with_measured(known["data"], checkpoint.values.get(BUILT))
        known = {**known, "data": data}
    datamodule = build(known, "data", seed=config["seed"], predict_path=config["input"])
    return datamodule, predict_mode.needs_no_data(config, datamodule, checkpoint)


def _prepare(config: dict[str, Any], datamodule: Any, backbone: nn.Module) -> None:
    """Read the data set; before a training replace ``auto`` options and check all files."""
    datamodule.fixed_order = bool(config["trainer"].get(OVERFIT))
    datamodule.prepare_data()
    datamodule.setup()
    if config["mode"] == "fit":
        config["data"] |= datamodule.measured_options()
        automatic.choose_values(config, datamodule, backbone)
        check_warmup(config["schedule"], config["trainer"])
    if config["mode"] == "fit" and is_first_process():
        datamodule.check_files()


def solves(model: nn.Module) -> bool:
    """Return True for a head that is solved from features instead of trained."""
    return bool(getattr(model, "solves", False))


def execute(
    parts: Components, config: dict[str, Any], folder: Path, new_length: str | None
) -> dict[str, float]:
    """Train, evaluate or predict, and return the closing metrics.

    Args:
        parts: Components of the run.
        config: Config of the run.
        folder: Run folder.
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
    report.log_network(task.model.backbone, config["backbone"] | datamodule.backbone_arguments)
    if solves(task.model):
        return frozen_fit.solve(engine, task, datamodule, config["seed"])
    if not trains(task):
        return evaluate_once(engine, task, datamodule)
    report.log_start(parts.facts, config, datamodule, engine.world_size)
    if parts.start:
        resume.log_start(parts.start, new_length)
        update_config(folder, config)
        report.reopen(folder)
    keep, started = config["checkpoints"], time.perf_counter()
    try:
        return trainer.fit(engine, task, datamodule, start=parts.start, keep=keep)
    except RunStopped as stop:
        if engine.is_global_zero and engine.global_step:
            facts = parts.facts | {"seconds": round(time.perf_counter() - started, 1)}
            report.write_stopped(folder, facts, engine, task, None if stop.waiting else datamodule)
        raise
