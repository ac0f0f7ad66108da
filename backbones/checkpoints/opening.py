"""A file of weights, opened once into one object, whoever wrote it; no code in it is ever run."""

from __future__ import annotations

import functools
import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor

from backbones.checkpoints.equations import RECORD
from backbones.checkpoints.histories import holds_histories, load_without_histories
from backbones.checkpoints.keys import strip_wrappers
from backbones.checkpoints.schema import check_parts, check_tensors
from backbones.checkpoints.seal import KEY, verify

# Where published files keep their weights (timm, mmengine and DeiT's release); averages come first,
# as in timm. mmengine keeps its average in state_dict, and in ema_state_dict what it was made from.
CONTAINERS = ("state_dict_ema", "model_ema", "state_dict", "model")
TASK = "model."  # before every name in a checkpoint of one of our tasks


class UnreadableFile(ValueError):
    """A file that is no checkpoint of tensors and plain values, or not a whole one."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What a file of weights holds.

    Attributes:
        path: The file, or what messages call it.
        content: All of it, as it was written.
        given: The tensors themselves, of a checkpoint that never was a file.
        unlike: Of a file of others the entries that are named like ours and hold something else.
    """

    path: str
    content: Any
    given: dict[str, Tensor] | None = None
    unlike: frozenset[str] = frozenset()

    @functools.cached_property
    def container(self) -> tuple[str, ...]:
        """The entries, one inside the other, that lead to the tensors; none where they lie bare."""
        content, names = self.content, []
        for name in CONTAINERS:
            if isinstance(content, dict) and isinstance(content.get(name), dict):
                content = content[name]
                names.append(name)
        return tuple(names)

    @functools.cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the container under their names in it; of two sets the average.

        Raises:
            ValueError: There are none, or some hold NaN or Inf.
        """
        if self.given is not None:
            return self.given
        tensors = _named_tensors(functools.reduce(dict.get, self.container, self.content), self)
        for key, value in tensors.items():
            if value.is_floating_point() and not value.isfinite().all():
                raise ValueError(f"{self.path}: {key} holds NaN or Inf; use an earlier checkpoint")
        return tensors

    @functools.cached_property
    def state_dict(self) -> dict[str, Tensor]:
        """The tensors without the prefixes of wrappers; of a whole model backbone and classifier.

        A model that keeps its backbone under ``backbone.`` gives that part and ``classifier.*``.

        Raises:
            ValueError: As ``tensors`` does.
        """
        return strip_wrappers(self.tensors)

    @functools.cached_property
    def values(self) -> dict[str, Any]:
        """What lies beside the weights, by name, such as the classes and the step."""
        content = self.content if isinstance(self.content, dict) else {}
        besides = {*CONTAINERS, "optimizer_states", *self.unlike}
        return {
            k: v
            for k, v in content.items()
            if isinstance(k, str) and k not in besides and not isinstance(v, Tensor)
        }

    @property
    def is_of_task(self) -> bool:
        """Whether it holds the whole model of a task of ours."""
        return all(key.startswith(TASK) for key in self.tensors)

    @property
    def record(self) -> Mapping[str, Any]:
        """By what options its network was built; nothing in files of others."""
        return self.values.get(RECORD, {})

    @property
    def grids(self) -> dict[str, tuple[int, int]]:
        """Map sizes (H, W) that mixers were built for, by their names in the network."""
        return {name: (grid[0], grid[1]) for name, grid in self.record.get("grids", {}).items()}

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """The names of the classes in label order; None in files of timm's or the authors'."""
        return tuple(self.values["class_names"]) if "class_names" in self.values else None

    @property
    def category_ids(self) -> tuple[int, ...]:
        """What the files of the data set call each label, if not by itself."""
        ids = self.values.get("category_ids", ())
        return tuple(ids) if len(ids) == len(self.class_names or ()) else ()

    @property
    def step(self) -> int | None:
        """The optimiser's steps behind it; None in files of others."""
        return self.values.get("global_step")

    @property
    def position(self) -> Mapping[str, Any] | None:
        """Where its training run stood; None where there is no run to go on with."""
        return self.values.get("position")

    @property
    def format(self) -> int | None:
        """The format of ours that it was written in; None in files of others."""
        return self.values.get(KEY, {}).get("format")


def open_checkpoint(
    path: str | Path, *, values_only: bool = False, map_location: Any = "cpu"
) -> Checkpoint:
    """Open a .pth/.pt/.ckpt/.safetensors file of ours, Lightning's, timm's, mmengine's or authors'.

    Args:
        path: The file.
        values_only: Only what lies beside the weights is asked for: the tensors of today's format
            stay on the disk, and no checksum is taken.
        map_location: Where tensors go, as for ``torch.load``.

    Raises:
        UnreadableFile: Not a checkpoint, truncated, or holding code.
        DamagedCheckpoint: Not what was written, by its schema or checksum.
        ValueError: No such file, or one of a newer format.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no checkpoint at {path}")
    content = _read(path, values_only and zipfile.is_zipfile(path), map_location)
    check_tensors(content, path)
    checkpoint = Checkpoint(str(path), content, unlike=check_parts(content, path))
    if values_only:  # no tensor is handed out that was not checked
        return Checkpoint(str(path), checkpoint.values)
    verify(content, path)
    return checkpoint


def in_memory(tensors: Mapping[str, Tensor], source: str) -> Checkpoint:
    """Tensors that were read elsewhere as a checkpoint, called by ``source`` in messages."""
    given = dict(tensors)
    return Checkpoint(source, given, given)


def _read(path: Path, mmap: bool, map_location: Any) -> object:
    try:
        if path.suffix == ".safetensors":
            return timm.models.load_state_dict(str(path))
        if holds_histories(path):
            return load_without_histories(path)
        return torch.load(path, map_location=map_location, weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        raise UnreadableFile(
            f"{path} holds more than tensors and plain values, or is no checkpoint; it is not "
            "opened, as it could run code. Re-save its state_dict with safetensors where you "
            "trust it"
        ) from error
    except Exception as error:  # foreign bytes make the readers raise all kinds
        reason = f"{type(error).__name__}: {error}"
        raise UnreadableFile(f"{path} is truncated or not a checkpoint ({reason})") from error


def _named_tensors(content: object, checkpoint: Checkpoint) -> dict[str, Tensor]:
    path = checkpoint.path
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
