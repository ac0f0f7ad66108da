"""Checkpoints in, weights out: safe reading, unwrapping, and a load that hides no difference."""

from __future__ import annotations

import logging
import math
import pickle
import re
import warnings
import zipfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import timm
import torch
from torch import Tensor

from backbones.base import Backbone, Mixer
from backbones.checkpoints.histories import holds_histories, load_without_histories
from backbones.checkpoints.seal import verify

V = TypeVar("V")
logger = logging.getLogger(__name__)

# Where published files keep their weights (timm, mmengine and DeiT's release); averages come first,
# as in timm. mmengine keeps its average in state_dict, and in ema_state_dict what it was made from.
CONTAINERS = ("state_dict_ema", "model_ema", "state_dict", "model")
MMPRETRAIN_CLASSIFIER = "head.fc."
# BatchNorm's, which files of early torch (torchvision's first weights) do not have, nor need.
BATCH_COUNTER = ".num_batches_tracked"
FEW = 0.1  # share of a network's values that is too small to be taken over in silence
WRAPPERS = ("module.", "_orig_mod.", "model.", "detector.", "segmentor.")


@dataclass(frozen=True)
class LoadReport:
    """What a checkpoint gave to a model.

    Attributes:
        source: The file.
        loaded: Number of tensors taken over.
        resized: Those of them that were computed anew for this network, such as a table of
            positions for other windows or images.
        initialised: Keys of the model that the file does not have (a new mixer, a new output norm).
        skipped: Keys of the file that the model has no place for (a replaced FFN, the classifier).
        dead: Keys of the file that change nothing, such as a zero bias of a model without biases.
    """

    source: str
    loaded: int
    resized: tuple[str, ...]
    initialised: tuple[str, ...]
    skipped: tuple[str, ...]
    dead: tuple[str, ...] = ()

    def __str__(self) -> str:
        """One line for a log."""
        return (
            f"{self.source}: {self.loaded} tensors loaded, of these {len(self.resized)} resized"
            f"{_some(self.resized)}, {len(self.initialised)} left at their initialisation"
            f"{_some(self.initialised)}, {len(self.skipped)} in the file not used"
            f"{_some(self.skipped)}"
        ) + (f", {len(self.dead)} dropped that change nothing{_some(self.dead)}" * bool(self.dead))


def read_state_dict(path: str | Path) -> dict[str, Tensor]:
    """Read the tensors of a .pth/.pt/.ckpt/.safetensors file without running code from it.

    Containers (Lightning, timm, mmengine, EMA) and wrapper prefixes are taken off. A model that
    keeps its backbone under ``backbone.`` gives that part and ``classifier.*``.

    Raises:
        ValueError: No such file, not a checkpoint, truncated, holding code, or holding NaN or Inf.
    """
    return strip_wrappers(read_tensors(path))


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """Read the tensors of a file, with the keys as they stand in its container.

    Raises:
        ValueError: No such file, not a checkpoint, truncated, damaged, of a newer format, holding
            code, or holding NaN or Inf.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no checkpoint at {path}")
    content = _read(path)
    verify(content, path)
    tensors = _unwrap(content, path)
    for key, value in tensors.items():
        if value.layout != torch.strided or value.is_complex():
            raise ValueError(f"{path}: {key} is no plain tensor but {value.layout}, {value.dtype}")
        if value.is_floating_point() and not value.isfinite().all():
            raise ValueError(f"{path}: {key} holds NaN or Inf; use an earlier checkpoint")
    return tensors


def read_values(path: str | Path) -> dict[str, object]:
    """What a checkpoint of ours holds beside its tensors, such as the names of the classes.

    The tensors of today's format are left on the disk.

    Raises:
        ValueError: No such file, not a checkpoint, truncated or holding code.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no checkpoint at {path}")
    content = _read(path, mmap=zipfile.is_zipfile(path))
    content = content if isinstance(content, dict) else {}
    kept = {key: value for key, value in content.items() if isinstance(key, str)}
    return {
        key: value for key, value in kept.items() if key not in (*CONTAINERS, "optimizer_states")
    }


def load_backbone_weights(backbone: Backbone, path: str | Path) -> LoadReport:
    """Load a checkpoint file into a backbone; see ``load_state_dict`` for what may differ."""
    return load_state_dict(backbone, read_state_dict(path), str(path))


def refuse_untrained(backbone: Backbone, report: LoadReport) -> None:
    """Refuse a load that leaves mixers as they began, where nothing will train them.

    Raises:
        ValueError: The file had no weights of swapped-in mixers; they are listed.
    """
    mixers = [
        prefix.removesuffix(".")
        for prefix in backbone.mixers()
        if any(key.startswith(prefix) for key in report.initialised)
    ]
    if mixers:
        raise ValueError(
            f"{report.source} has no weights of the mixers of {backbone.name}{_some(mixers)}, "
            "which would be random; name the backbone and options it was trained with"
        )


def load_state_dict(backbone: Backbone, state_dict: dict[str, Tensor], source: str) -> LoadReport:
    """Load tensors under our, timm's or the authors' names into a backbone.

    Only these may differ: a swapped-in mixer that is absent as a whole (the file has the host's own
    FFN or attention there, or another mixer), what dense prediction adds, what only classification
    has, and BatchNorm's counters of batches. Where the host's own module is the same mixer with
    other options, what fits is taken over. A warning lists what is missing beside absent mixers.

    Raises:
        ValueError: Anything else is missing, left over, of another shape or of whole numbers
            (quantised weights); the keys are listed.
    """
    file = state_dict
    state_dict = backbone.convert_state_dict(dict(file))
    dead = []
    for prefix, mixer in backbone.named_modules():
        if isinstance(mixer, Mixer):
            below = f"{prefix}."
            given = _below(below, state_dict)
            dead += [f"{below}{key}" for key, value in given.items() if mixer.is_dead(key, value)]
            converted = mixer.convert_state_dict(given)
            state_dict |= {f"{below}{key}": value for key, value in converted.items()}
    state_dict = {key: value for key, value in state_dict.items() if key not in dead}
    own = backbone.state_dict()
    absent_mixers, related_mixers = _absent_and_related(backbone, state_dict, dead)
    unfit = {
        key
        for key, value in state_dict.items()
        if key.startswith(related_mixers) and key in own and own[key].shape != value.shape
    }
    usable = {
        key: value
        for key, value in state_dict.items()
        if key in own and key not in unfit and not key.startswith(absent_mixers)
    }
    missing = [key for key in own if key not in usable]
    surplus = [key for key in state_dict if key not in usable]
    reshaped = [key for key, value in usable.items() if own[key].shape != value.shape]

    may_miss = (*absent_mixers, *related_mixers, *backbone.map_keys)
    may_remain = (*absent_mixers, *related_mixers, *backbone.classification_keys, "classifier.")
    wrong = [
        f"missing {key}"
        for key in missing
        if not (key.startswith(may_miss) or key.endswith(BATCH_COUNTER))
    ]
    wrong += [f"unexpected {key}" for key in surplus if not key.startswith(may_remain)]
    wrong += [
        f"{k}: {tuple(state_dict[k].shape)} instead of {tuple(own[k].shape)}" for k in reshaped
    ]
    wrong += [
        f"{key}: {value.dtype} instead of {own[key].dtype}"
        for key, value in usable.items()
        if own[key].is_floating_point() and not value.is_floating_point()
    ]
    if wrong:
        raise ValueError(
            f"{source} does not fit {backbone.name or type(backbone).__name__}: {len(wrong)} "
            f"keys differ{_some(wrong, 8)}; name the backbone and options it was trained with"
        )
    backbone.load_state_dict(usable, strict=False)
    places = {_place(value) for value in file.values()}
    resized = tuple(key for key, value in usable.items() if _place(value) not in places)
    report = LoadReport(source, len(usable), resized, tuple(missing), tuple(surplus), tuple(dead))
    logger.info("%s", report)
    _warn_of_more_than_mixers(report, own, absent_mixers, related_mixers)
    return report


def _absent_and_related(
    backbone: Backbone, state_dict: Mapping[str, Tensor], dead: Collection[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Prefixes of mixers that a file has not, and of those that it has with other options."""
    absent, related = [], []
    for prefix, mixer in backbone.mixers().items():
        given = _below(prefix, state_dict)
        if mixer.is_related and (_is_replaced(mixer, given, _below(prefix, dict.fromkeys(dead)))):
            related.append(prefix)
        elif _is_absent(mixer, given):
            absent.append(prefix)
    return tuple(absent), tuple(related)


def _warn_of_more_than_mixers(
    report: LoadReport,
    own: Mapping[str, Tensor],
    absent: tuple[str, ...],
    related: tuple[str, ...],
) -> None:
    """Warn of what a load left at its initialisation, or out, beside whole mixers.

    Where whole mixers are nearly all of a network, as in PosMLP, that is said as well.
    """
    missing = [
        key
        for key in report.initialised
        if not (key.startswith(absent) or key.endswith(BATCH_COUNTER))
    ]
    unused = [key for key in report.skipped if key.startswith(related)]
    total = sum(value.numel() for value in own.values())
    share = 1 - sum(own[key].numel() for key in report.initialised) / total
    if not missing and not unused and share > FEW:
        return
    parts = [
        f"{len(keys)} tensors {what}{_some(keys)}"
        for keys, what in (
            (missing, "of the network are not in it and begin anew"),
            (unused, "in it have no place in a mixer with these options"),
        )
        if keys
    ]
    if absent:
        names = [prefix.removesuffix(".") for prefix in absent]
        parts.append(f"{len(names)} mixers begin anew{_some(names)}")
    warnings.warn(
        f"{report.source} gave {math.floor(1000 * share) / 10}% of the network's values: "
        f"{'; '.join(parts)}",
        stacklevel=4,
    )


def rename(
    state_dict: Mapping[str, Tensor], patterns: Iterable[tuple[str, str]]
) -> dict[str, Tensor]:
    """Rename keys by regular expressions and their replacements, one after the other."""
    renamed = {}
    for key, value in state_dict.items():
        for pattern, replacement in patterns:
            key = re.sub(pattern, replacement, key)
        renamed[key] = value
    return renamed


def _read(path: Path, *, mmap: bool = False) -> object:
    try:
        if path.suffix == ".safetensors":
            return timm.models.load_state_dict(str(path))
        if holds_histories(path):
            return load_without_histories(path)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} holds more than tensors and plain values, or is no checkpoint; it is not "
            "opened, as it could run code. Re-save its state_dict with safetensors where you "
            "trust it"
        ) from error
    except Exception as error:  # foreign bytes make the readers raise all kinds
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} is truncated or not a checkpoint ({reason})") from error


def _unwrap(content: object, path: Path) -> dict[str, Tensor]:
    for container in CONTAINERS:
        if isinstance(content, dict) and isinstance(content.get(container), dict):
            content = content[container]
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not a state_dict")
    tensors = {key: value for key, value in content.items() if isinstance(value, Tensor)}
    nameless = [key for key in tensors if not isinstance(key, str)]
    if nameless:
        raise ValueError(f"{path} is no state_dict: its tensors have the keys {nameless[:8]}")
    if not tensors:
        raise ValueError(
            f"{path} holds no tensors; its entries are {sorted(map(str, content))[:8]}"
        )
    return tensors


def strip_wrappers(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Take off prefixes that all keys share; of a whole model keep backbone and classifier."""
    stripped = bool(state_dict)
    while stripped:
        stripped = False
        for wrapper in WRAPPERS:
            if all(key.startswith(wrapper) for key in state_dict):
                state_dict = {key.removeprefix(wrapper): value for key, value in state_dict.items()}
                stripped = True
    # LVT's authors call their stages backbone.0 to backbone.3; no backbone of ours is a mere list.
    if any(re.match(r"backbone\.\D", key) for key in state_dict):
        kept = ("backbone.", "classifier.", MMPRETRAIN_CLASSIFIER)
        state_dict = {
            k.replace(MMPRETRAIN_CLASSIFIER, "classifier.", 1).removeprefix("backbone."): v
            for k, v in state_dict.items()
            if k.startswith(kept)
        }
    return state_dict


def _place(tensor: Tensor) -> int:
    """Where a tensor's values lie: equal for a view of it, another one for what was computed."""
    return tensor.untyped_storage().data_ptr()


def _below(prefix: str, state_dict: Mapping[str, V]) -> dict[str, V]:
    return {k.removeprefix(prefix): v for k, v in state_dict.items() if k.startswith(prefix)}


def _is_replaced(mixer: Mixer, given: Mapping[str, Tensor], dead: Collection[str]) -> bool:
    """Whether a file has the host's own module in a mixer's place, dead tensors left out."""
    own = {key: value.shape for key, value in mixer.state_dict().items()}
    shapes = {key: value.shape for key, value in given.items()}
    replaced = {key: shape for key, shape in (mixer.replaced or {}).items() if key not in dead}
    return shapes == replaced and shapes != own


def _is_absent(mixer: Mixer, given: Mapping[str, Tensor]) -> bool:
    """Whether a file holds something else in a mixer's place, such as the host's FFN.

    Half of the mixer is an error, not a new mixer; names alone do not tell, as a mixer may use the
    FFN's (fc1, fc2) at other widths.
    """
    own = {key: value.shape for key, value in mixer.state_dict().items()}
    shapes = {key: value.shape for key, value in given.items()}
    return shapes.keys().isdisjoint(own) or (shapes == mixer.replaced and shapes != own)


def _some(keys: Collection[str], limit: int = 4) -> str:
    if not keys:
        return ""
    shown = ", ".join(list(keys)[:limit])
    return f" ({shown}, ...)" if len(keys) > limit else f" ({shown})"
