"""Components of a run: checked, built in the order of the data flow, and started."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from torch import nn

from backbones.checkpoints.opening import Checkpoint, open_checkpoint
from backbones.options import matches_of
from datamodules import BaseDataModule
from tasks.engine.base import BaseTask
from tasks.engine.callbacks.optional import make_callbacks
from tasks.engine.checkpoints.entries import BUILT
from tasks.engine.family import find_family, imported
from tasks.engine.instantiate import build
from tasks.engine.loading import build_backbone, build_task
from tasks.engine.loops.signals import RunStopped
from tasks.engine.normalisation import take_preprocessing
from tasks.engine.optimisation import automatic
from tasks.engine.optimisation.optimizer import check_optimizer
from tasks.engine.run_folder.run_config import RunConfig
from tools.cli.processes import check_trainer, is_first_process
from tools.config.config_checks import check_warmup
from tools.config.training_length import OVERFIT
from tools.runs import report, trainer
from tools.runs.disk import check_space
from tools.runs.folder import mark_latest, update_config
from tools.runs.logger_setup import make_loggers
from tools.runs.shared_start import start_as_host
from tools.runs.source import Source, keep_source, read_source

if TYPE_CHECKING:
    from tools.runs.resume import Start


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
    start: Start | None = None


def build_components(config: RunConfig, folder: Path, *, resumed: bool) -> Components:
    """Build the components of a run.

    Args:
        config: Config of the run.
        folder: Run folder.
        resumed: Resume the run in this folder.
    """
    seed_everything(config.seed, workers=True, verbose=False)
    code = read_source() if is_first_process() else Source(None)
    training = config.mode == "fit"
    loggers = make_loggers(config.logger, folder, config) if training else []
    checkpoint = None if training or not config.ckpt else open_checkpoint(config.ckpt)
    datamodule, without_data = _datamodule(config, checkpoint)
    # Refuses wrong options before the data are read.
    backbone = build_backbone(_restarted(config, resumed), datamodule)
    if not training and checkpoint is None:
        _check_untrained(backbone, config.mode)
    foreign = checkpoint is not None and checkpoint.format is None
    if foreign or (training and not resumed):
        weights = checkpoint if foreign else config.backbone["pretrained"]
        augmentation = getattr(datamodule, "augmentation", None)
        line = take_preprocessing(config, augmentation, backbone, weights)
        if line is not None:
            report.log_info(line)
            datamodule, without_data = _datamodule(config, checkpoint)
    if not without_data:
        _prepare(config, datamodule, backbone)
    task = build_task(_restarted(config, resumed), datamodule, backbone)
    if training:
        start_as_host(_restarted(config, resumed), datamodule, task)
        task.prepare_training(datamodule)
    loaded = {} if checkpoint is None else _load(task, checkpoint, config.trainer["precision"])
    options, start = config.trainer, None
    shape = report.input_shape(config, datamodule)
    if resumed:
        from tools.runs.resume import find_start

        start = find_start(folder, config.ckpt, task, options)
    facts = _known_facts(config, task, shape) | loaded | {"git_commit": code.commit}
    engine = trainer.make_trainer(
        options,
        folder,
        task.monitor,
        task.mode,
        training=training,
        checkpoint_every=config.checkpoint_every,
        fixed_size=datamodule.fixed_size,
        callbacks=_callbacks(config, folder, task) if training else (),
        loggers=loggers,
    )
    if training and not solves(task.model) and trains(task):
        trainer.check_fit(engine, task, datamodule)
        if is_first_process():
            check_space(folder, task, top_k=config.callbacks["top_k"])
    if options.get("compile"):
        from tasks.engine.loops.compilation import check_compiler, compile_blocks

        check_compiler(engine.strategy.root_device)
        compile_blocks(task.model)
    return Components(datamodule, task, engine, facts, code, start)


def _known_facts(config: RunConfig, task: BaseTask, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return the facts that are known before a run starts; of a training also its code's."""
    facts = report.initial_facts(config, task.model, shape)
    if config.mode == "fit":
        facts |= {key: entry["answers"] for key, entry in task.fingerprint.items()}
    return facts


def _check_untrained(backbone: nn.Module, mode: str) -> None:
    """Refuse to evaluate the random weights of a backbone."""
    if any(True for _ in backbone.parameters()):
        raise ValueError(
            f"mode={mode} needs trained weights: pass ckpt=<run folder or checkpoint file>"
        )


def _restarted(config: RunConfig, resumed: bool) -> RunConfig:
    """Return the config of the network; that of a resumed run has its weights in a checkpoint."""
    if not resumed:
        return config
    backbone = {**config.backbone, "pretrained": None}
    return config.model_copy(
        update={"backbone": backbone, "keep_classifier": False, "keep_head": False}
    )


def _load(task: BaseTask, checkpoint: Checkpoint, precision: str) -> dict[str, Any]:
    """Load the weights of a checkpoint, and return the fact of its step."""
    if precision == "64-true":
        task.double()  # float32 would round the weights
    task.load_weights(checkpoint)
    return {"checkpoint_step": checkpoint.step}


def check_config(config: RunConfig) -> RunConfig:
    """Check what needs the libraries, before anything is built, and solve the widths of mixers.

    Raises:
        ValueError: Names the option and what it may be.
    """
    if config.mode == "fit":
        choices = {key: v for key, v in config.optimizer.items() if v != automatic.AUTO}
        check_optimizer({"lr": 1.0, **choices})
    backbone = config.backbone
    if any(matches_of(backbone.get(group)) for group in ("mixer", "token_mixer")):
        from backbones.analysis.matching import solve_match

        backbone = {"name": backbone["name"], **solve_match(**backbone)}
    check_trainer(config.trainer)
    if config.mode == "fit":
        family = find_family(config.task_name)
        metrics = {metric.name: metric.direction for metric in family.metrics} | {"loss": "min"}
        make_callbacks(Path(), f"val/{family.monitor}", metrics, **config.callbacks)
    return config.model_copy(update={"backbone": backbone})


def check_settings(config: RunConfig) -> None:
    """Refuse a training's settings that are wrong for any data, without reading or drawing values.

    Raises:
        ValueError: A wrong setting.
    """
    config = check_config(config)
    datamodule, _ = _datamodule(config, None)
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        build_backbone(_restarted(config, resumed=True), datamodule)


def read_data(config: RunConfig) -> Any:
    """Return the datamodule of a run with its data read.

    Raises:
        ValueError: The data are wrong, or cannot be divided as the config asks.
    """
    datamodule, _ = _datamodule(config, None)
    datamodule.prepare_data()
    datamodule.setup()
    return datamodule


def _callbacks(config: RunConfig, folder: Path, task: BaseTask) -> list[Callback]:
    """Make the callbacks of a config's group ``callbacks``."""
    checkpoints = folder / "checkpoints"
    return make_callbacks(checkpoints, task.monitor, task.metric_directions, **config.callbacks)


def _datamodule(config: RunConfig, checkpoint: Checkpoint | None) -> tuple[Any, bool]:
    """Build the datamodule; return it, and True if the run needs no data set."""
    values = automatic.apply_fixed_schedule(config)
    if checkpoint is not None:  # evaluated images are normalised as in training
        data = automatic.with_measured(values.data, checkpoint.values.get(BUILT))
        values = values.model_copy(update={"data": data})
    datamodule = build(values.data, "data", seed=config.seed, predict_path=config.input)
    datamodule.held_out = config.held_out
    if checkpoint is None or config.input is None:
        return datamodule, False
    from tools.runs.predict_mode import needs_no_data

    return datamodule, needs_no_data(config, datamodule, checkpoint)


def _prepare(config: RunConfig, datamodule: Any, backbone: nn.Module) -> None:
    """Read the data set; before a training replace ``auto`` options and check all files."""
    datamodule.fixed_order = bool(config.trainer.get(OVERFIT))
    datamodule.prepare_data()
    datamodule.setup()
    if config.mode == "fit":
        config.data |= datamodule.measured_options()
        automatic.choose_values(config, datamodule, backbone)
        check_warmup(config.schedule, config.trainer)
    if config.mode == "fit" and is_first_process():
        datamodule.check_files()


def trains(task: BaseTask) -> bool:
    """Return True if the network has a weight to train."""
    return any(parameter.requires_grad for parameter in task.model.parameters())


def solves(model: nn.Module) -> bool:
    """Return True for a head that is solved from features instead of trained."""
    return bool(getattr(model, "solves", False))


def execute(
    parts: Components, config: RunConfig, folder: Path, new_length: str | None
) -> dict[str, float]:
    """Train, evaluate or predict, and return the closing metrics.

    Args:
        parts: Components of the run.
        config: Config of the run.
        folder: Run folder.
        new_length: From ``folder.describe_new_length``.
    """
    task, datamodule, engine = parts.task, parts.datamodule, parts.engine
    if config.mode == "predict":
        from tools.runs.predict_mode import predict

        return predict(engine, task, datamodule)
    if config.mode != "fit" and datamodule.parts:
        evaluate_parts = imported(task.family.parts_evaluation, "tools.runs.robustness_mode")
        return evaluate_parts(engine, task, datamodule, config, folder)
    if config.mode != "fit":
        return trainer.evaluate(engine, config.mode, task, datamodule)
    mark_latest(folder)
    if is_first_process():
        keep_source(folder, parts.code, network=task.model)
    report.log_network(task.model.backbone)
    if solves(task.model):
        from tools.runs import frozen_fit

        return frozen_fit.solve(engine, task, datamodule, config.seed)
    if not trains(task):
        from tools.runs.untrained import evaluate_once

        return evaluate_once(engine, task, datamodule)
    report.log_start(parts.facts, config, datamodule, engine.world_size)
    if parts.start:
        from tools.runs.resume import log_start

        log_start(parts.start, new_length)
        update_config(folder, config, resumed=True)
        report.reopen(folder)
    keep, started = config.checkpoints, time.perf_counter()
    try:
        return trainer.fit(engine, task, datamodule, start=parts.start, keep=keep)
    except RunStopped as stop:
        if engine.is_global_zero and engine.global_step:
            facts = parts.facts | {"seconds": round(time.perf_counter() - started, 1)}
            report.write_stopped(folder, facts, engine, task, None if stop.waiting else datamodule)
        raise
