"""A file of weights, opened once into one object, whoever wrote it; no code in it is ever run."""

from __future__ import annotations

import functools
import logging
import pickle
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from backbones.checkpoints.equations import RECORD
from backbones.checkpoints.folders import read_sharded, weights_in
from backbones.checkpoints.foreign import objects_in, other_kind, read_foreign, refused_names
from backbones.checkpoints.keys import strip_wrappers, without_inner_wrappers
from backbones.checkpoints.schema import FREE, SHARED, check_parts, check_tensors
from backbones.checkpoints.seal import KEY, DamagedCheckpoint, verify

logger = logging.getLogger(__name__)

# Where published files keep their weights (timm, mmengine and DeiT's release, then others);
# averages come first, as in timm. mmengine keeps its average in state_dict, and in ema_state_dict
# what it was made from.
CONTAINERS = (
    "state_dict_ema", "model_ema", "ema_model", "ema", "params_ema", "state_dict",
    "model_state_dict", "model_state", "model", "module", "net", "network", "weights", "params",
)  # fmt: skip
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
        """The entries, one inside the other, that lead to the tensors; none where they lie bare.

        Raises:
            ValueError: Several entries have tensors, and none of them a usual name.
        """
        content, names = self.content, []
        while isinstance(content, dict):
            found = [name for name in CONTAINERS if _holds_tensors(content.get(name))]
            if not found and not _has_tensors(content):
                found = [name for name, value in content.items() if _holds_tensors(value)]
                if len(found) > 1:
                    raise ValueError(
                        f"{self.path} has tensors in several entries, {_listed(found)}; save the "
                        "one that is meant to a file of its own"
                    )
            if not found:
                break
            content = content[found[0]]
            names.append(found[0])
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
        tensors = without_inner_wrappers(tensors)
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
        kept, left_out = strip_wrappers(self.tensors, self.path)
        if left_out:
            logger.info("%s: not of the network, left out: %s", self.path, _listed(left_out))
        return kept

    @functools.cached_property
    def values(self) -> dict[str, Any]:
        """What lies beside the weights, by name, such as the classes and the step."""
        content = self.content if isinstance(self.content, dict) else {}
        weights = {name for name in CONTAINERS if _holds_tensors(content.get(name))}
        besides = {*weights, "optimizer_states", *self.unlike}
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
        names = self.values.get("class_names")
        return None if names is None else tuple(names)

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
        path: The file, or a folder with one, as a run's or of the Hugging Face hub.
        values_only: Only what lies beside the weights is asked for: the tensors of today's format
            stay on the disk, and no checksum is taken.
        map_location: Where tensors go, as for ``torch.load``.

    Raises:
        UnreadableFile: Not a checkpoint, truncated, or holding code.
        DamagedCheckpoint: Not what was written, by its schema or checksum.
        ValueError: No such file, or one of a newer format.
    """
    path = Path(path)
    if path.is_dir():
        path = weights_in(path)
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
        if path.name.endswith(".index.json"):
            return read_sharded(path, lambda shard: _read(shard, mmap, map_location))
        if _is_safetensors(path):
            return safetensors.torch.load_file(path)
        _refuse_expansion(path)
        kind = other_kind(path)
        if kind is not None:
            raise UnreadableFile(f"{path} is not a checkpoint but {kind}") from ValueError(kind)
        return read_foreign(path, map_location, mmap=mmap)
    except pickle.UnpicklingError as error:
        raise UnreadableFile(_refused(path)) from error
    except ValueError as error:
        if isinstance(error, UnreadableFile) or str(path) in str(error):
            raise
        raise _unreadable(path, error) from error
    except Exception as error:  # foreign bytes make the readers raise all kinds
        raise _unreadable(path, error) from error


def _refuse_expansion(path: Path) -> None:
    """Refuse an archive whose entries have many times its size, before any is read.

    Raises:
        DamagedCheckpoint: It is one; ``torch.save`` does not compress.
    """
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        total = sum(entry.file_size for entry in archive.infolist())
    size = path.stat().st_size
    if total > SHARED * size + FREE:
        raise DamagedCheckpoint(
            f"{path} has {size:,} bytes, which expand to {total:,}; save it again with torch.save, "
            "which does not compress"
        )


def _is_safetensors(path: Path) -> bool:
    """Return True by the name, or by the first bytes: the hub's cache has names without endings."""
    if path.suffix == ".safetensors":
        return True
    with path.open("rb") as file:
        start = file.read(9)
    return len(start) == 9 and start[8:] == b"{" and int.from_bytes(start[:8], "little") < 2**27


def _refused(path: Path) -> str:
    names = refused_names(path)
    found = f" ({_listed(names)})" if names else ""
    return (
        f"{path} holds more than tensors and plain values{found}, or is no checkpoint; it is not "
        "opened, as it could run code. Re-save its state_dict with safetensors where you trust it"
    )


def _unreadable(path: Path, error: Exception) -> UnreadableFile:
    reason = f"{type(error).__name__}: {error}"
    return UnreadableFile(f"{path} is truncated or not a checkpoint ({reason})")


def _named_tensors(content: object, checkpoint: Checkpoint) -> dict[str, Tensor]:
    path = checkpoint.path
    objects = objects_in(content) if not _has_tensors(content) else []
    if objects:
        raise ValueError(
            f"{path} holds more than tensors and plain values: whole objects ({_listed(objects)}) "
            "stand in the place of weights; save the state_dict of the model instead"
        )
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


def _has_tensors(content: object) -> bool:
    return isinstance(content, dict) and any(isinstance(v, Tensor) for v in content.values())


def _holds_tensors(content: object) -> bool:
    """Return True for a dictionary of named tensors, or one with such a container in it."""
    if not isinstance(content, dict):
        return False
    named = any(isinstance(k, str) and isinstance(v, Tensor) for k, v in content.items())
    return named or any(_holds_tensors(content.get(name)) for name in CONTAINERS)


def _listed(names: Iterable[object], limit: int = 4) -> str:
    found = [str(name) for name in names]
    return ", ".join(found[:limit]) + f" and {len(found) - limit} more" * (len(found) > limit)
