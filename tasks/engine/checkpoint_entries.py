"""What a task adds to a checkpoint beside its weights: how it was built, and the average."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from backbones.checkpoints.equations import RECORD
from backbones.options import plain_config
from tasks.engine.ema import WeightEMA

BUILT = "config"  # says how the task was built
# The average: if it is what a run reports, and if it is not.
EMA, UNREPORTED = "state_dict_ema", "state_dict_ema_not_reported"


def built_config(task: Any) -> dict[str, Any]:
    """Return what builds a task again, as a run's config has it.

    It is empty if the model is not a head of ``heads`` on a backbone of ``create_backbone``.
    """
    backbone: Any = getattr(task.model, "backbone", None)
    head, data = getattr(task.model, "made_by", None), getattr(task.data, "made_by", None)
    if backbone is None or not head or not getattr(backbone, "made_by", None):
        return {}
    groups = {"backbone": backbone.made_by, "head": head, "data": data, "task": task.made_by}
    groups |= {"optimizer": task.optimizer_options, "schedule": task.schedule_options}
    groups["task"] = {key: value for key, value in task.made_by.items() if key not in groups}
    try:
        return {name: plain_config(part) for name, part in groups.items()}
    except TypeError:
        return {}


def network_entries(task: Any) -> dict[str, Any]:
    """Return how the task and its network were built, and the average where loaders look first."""
    config, ema = task.config(), task.ema
    entries = {BUILT: config} if config else {}
    entries[RECORD] = dict(getattr(getattr(task.model, "backbone", None), "record", {}))
    if ema is not None and ema.tensors:
        state = ema.state_dict()
        tensors = {f"model.{key}": value for key, value in state["tensors"].items()}
        # Loaders of weights find it under the first name, whoever wrote them.
        place = EMA if ema.is_reported else UNREPORTED
        entries |= {place: tensors, "ema_steps": state["steps"]}
    return entries


def load_average(ema: WeightEMA | None, checkpoint: Mapping[str, Any], model: nn.Module) -> None:
    """Restore the average of a checkpoint, if there is one."""
    place = EMA if EMA in checkpoint else UNREPORTED
    if ema is None or place not in checkpoint:
        return
    ema.is_reported = place == EMA
    tensors = {key.removeprefix("model."): value for key, value in checkpoint[place].items()}
    ema.load_state_dict({"tensors": tensors, "steps": checkpoint["ema_steps"]}, model)


def weights_problem(tensors: Mapping[str, Tensor]) -> str | None:
    """Return what is wrong with weights or statistics; the latter may be each process's own."""
    for name, value in tensors.items():
        if value.is_floating_point() and not value.isfinite().all():
            return f"{name} holds NaN or Inf; the checkpoint before is kept"
    return None
