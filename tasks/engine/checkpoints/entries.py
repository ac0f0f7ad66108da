"""Entries that a task adds to a checkpoint: its config and the averaged weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from backbones.checkpoints.behaviour import fingerprint
from backbones.checkpoints.equations import FINGERPRINT, RECORD
from backbones.options import plain_config

if TYPE_CHECKING:
    from tasks.engine.callbacks.ema import WeightEMA

BUILT = "config"  # config of the task
# The average: if the run reports it, and if the run reports the weights.
EMA, UNREPORTED = "state_dict_ema", "state_dict_ema_not_reported"


def built_config(task: Any) -> dict[str, Any]:
    """Return the config that rebuilds a task, in the form of a run's config.

    It is empty unless the model is a head of ``heads`` on a backbone of ``create_backbone``.
    """
    backbone: Any = getattr(task.model, "backbone", None)
    head, data = getattr(task.model, "made_by", None), getattr(task.data, "made_by", None)
    if backbone is None or not head or not getattr(backbone, "made_by", None):
        return {}
    groups = {"backbone": _complete(backbone), "head": head, "data": data, "task": task.made_by}
    groups |= {"optimizer": task.optimizer_options, "schedule": task.schedule_options}
    groups["task"] = {key: value for key, value in task.made_by.items() if key not in groups}
    try:
        return {name: plain_config(part) for name, part in groups.items()}
    except TypeError:
        return {}


def _complete(backbone: Any) -> dict[str, Any]:
    """Return a backbone's arguments with all options of its mixers, whose defaults may change."""
    options = dict(backbone.made_by)
    mixer, token_mixer = (backbone.record.get(kind) for kind in ("mixer", "token_mixer"))
    if isinstance(mixer, Mapping):  # the backbone's name has its name
        mixer = {key: value for key, value in mixer.items() if key != "name"}
    if mixer is not None:
        options["mixer"] = mixer
    return options if token_mixer is None else {**options, "token_mixer": token_mixer}


def fingerprint_entry(backbone: Any) -> dict[str, Any]:
    """Return the options of a backbone and what its code answers; empty for others than ours."""
    if getattr(backbone, "create", None) is None:
        return {}
    options = plain_config(_complete(backbone))
    answers = fingerprint(backbone.create, options, backbone.record)
    return {FINGERPRINT: {"options": options, "answers": answers}}


def network_entries(task: Any) -> dict[str, Any]:
    """Return the config of a task and the average, under the key that loaders read first."""
    config, ema = task.config(), task.ema
    entries = {BUILT: config} if config else {}
    record = getattr(getattr(task.model, "backbone", None), "record", {})
    entries[RECORD] = {**record, **task.fingerprint}
    if ema is not None and ema.tensors:
        state = ema.state_dict()
        tensors = {f"model.{key}": value for key, value in state["tensors"].items()}
        # Our loaders and timm's prefer the first key to the weights.
        place = EMA if ema.is_reported else UNREPORTED
        entries |= {place: tensors, "ema_steps": state["steps"]}
    return entries


def load_average(ema: WeightEMA | None, checkpoint: Mapping[str, Any], model: nn.Module) -> None:
    """Restore the average of a checkpoint, if any."""
    place = EMA if EMA in checkpoint else UNREPORTED
    if ema is None or place not in checkpoint:
        return
    ema.is_reported = place == EMA
    tensors = {key.removeprefix("model."): value for key, value in checkpoint[place].items()}
    ema.load_state_dict({"tensors": tensors, "steps": checkpoint["ema_steps"]}, model)


def weights_problem(tensors: Mapping[str, Tensor]) -> str | None:
    """Describe weights or statistics that are not finite; None if all are."""
    for name, value in tensors.items():
        if value.is_floating_point() and not value.isfinite().all():
            return f"{name} contains NaN or Inf; the previous checkpoint is kept"
    return None
