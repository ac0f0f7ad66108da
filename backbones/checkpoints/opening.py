"""Files of weights of any tool, opened once into one object without running their code."""

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
from backbones.checkpoints.hub import is_model_source, open_model_folder, read_entries
from backbones.checkpoints.keys import NETWORK, strip_wrappers, without_inner_wrappers
from backbones.checkpoints.schema import FREE, SHARED, check_parts, check_tensors
from backbones.checkpoints.seal import KEY, DamagedCheckpoint, verify

logger = logging.getLogger(__name__)

# Entries with the weights in published files (timm, mmengine and DeiT's release, then others);
# averages come first, as in timm. mmengine stores its average in state_dict and the trained weights
# in ema_state_dict.
CONTAINERS = (
    "state_dict_ema", "model_ema", "ema_model", "ema", "params_ema", "state_dict",
    "model_state_dict", "model_state", "model", "module", "net", "network", "weights", "params",
)  # fmt: skip
TASK = "model."  # before every name in a checkpoint of one of our tasks


class UnreadableFile(ValueError):
    """File that is truncated, or holds more than tensors and plain values."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Content of a file of weights.

    Attributes:
        path: The file, or its name in messages.
        content: The content as written.
        weights: The tensors, for a checkpoint that was read elsewhere.
        unlike: Entries of other tools' files that have our names but another form.
    """

    path: str
    content: Any
    weights: dict[str, Tensor] | None = None
    unlike: frozenset[str] = frozenset()

    @functools.cached_property
    def container(self) -> tuple[str, ...]:
        """Names of the nested entries that lead to the tensors.

        Raises:
            ValueError: Several entries of unusual names have tensors.
        """
        content, names = self.content, []
        while isinstance(content, dict):
            entries = [name for name in CONTAINERS if _holds_tensors(content.get(name))]
            if not entries and not _has_tensors(content):
                entries = [name for name, value in content.items() if _holds_tensors(value)]
                if len(entries) > 1:
                    raise ValueError(
                        f"{self.path} has tensors in several entries, {_enumerate(entries)}; save "
                        "one of them to a separate file"
                    )
            if not entries:
                break
            content = content[entries[0]]
            names.append(entries[0])
        return tuple(names)

    @functools.cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Tensors of the container under their names in it; the average if there are two sets.

        Raises:
            ValueError: The container is empty, or tensors hold NaN or Inf.
        """
        if self.weights is not None:
            return self.weights
        tensors = _named_tensors(functools.reduce(dict.get, self.container, self.content), self)
        tensors = without_inner_wrappers(tensors)
        for key, value in tensors.items():
            if value.is_floating_point() and not value.isfinite().all():
                raise ValueError(f"{self.path}: {key} holds NaN or Inf; use an earlier checkpoint")
        return tensors

    @functools.cached_property
    def state_dict(self) -> dict[str, Tensor]:
        """Tensors without the prefixes of wrappers.

        A model with a part ``backbone.`` is reduced to that part and ``classifier.*``. A wrapper
        ``network.`` stays; ``convert`` removes it for backbones without such a part.

        Raises:
            ValueError: As ``tensors``.
        """
        tensors, left_out = strip_wrappers(self.tensors, self.path, NETWORK)
        if left_out:
            logger.info("%s: skipped outside the network: %s", self.path, _enumerate(left_out))
        return tensors

    @functools.cached_property
    def values(self) -> dict[str, Any]:
        """All entries except weights, by name, such as the classes and the step."""
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
        """True if it holds the whole model of one of our tasks."""
        return all(key.startswith(TASK) for key in self.tensors)

    @property
    def record(self) -> Mapping[str, Any]:
        """Options that its network was built with; empty in other tools' files."""
        return self.values.get(RECORD, {})

    @property
    def grids(self) -> dict[str, tuple[int, int]]:
        """Map sizes (H, W) that mixers were built for, by their names in the network."""
        return {name: (grid[0], grid[1]) for name, grid in self.record.get("grids", {}).items()}

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Names of the classes in label order; None in files of timm or the authors."""
        names = self.values.get("class_names")
        return None if names is None else tuple(names)

    @property
    def category_ids(self) -> tuple[int, ...]:
        """Ids of the labels in the data set's files, if they differ from the labels."""
        ids = self.values.get("category_ids", ())
        return tuple(ids) if len(ids) == len(self.class_names or ()) else ()

    @property
    def step(self) -> int | None:
        """Steps of the optimiser so far; None in other tools' files."""
        return self.values.get("global_step")

    @property
    def position(self) -> Mapping[str, Any] | None:
        """Position of its training run; None if it cannot be resumed."""
        return self.values.get("position")

    @property
    def format(self) -> int | None:
        """Our format that it was written in; None in other tools' files."""
        return self.values.get(KEY, {}).get("format")


def open_checkpoint(
    path: str | Path, *, values_only: bool = False, map_location: Any = "cpu"
) -> Checkpoint:
    """Open a .pth/.pt/.ckpt/.safetensors file of ours, Lightning's, timm's, mmengine's or authors'.

    Args:
        path: The file, a folder with one, such as a run's, or a model folder, ``hf-hub:...``.
        values_only: Read all entries except the weights: tensors of today's format stay on the
            disk, and the checksum is skipped.
        map_location: Device of the tensors, as for ``torch.load``.

    Raises:
        UnreadableFile: The file is not a checkpoint, is truncated, or holds code.
        DamagedCheckpoint: Its schema or checksum is wrong.
        ValueError: The file is missing, or has a newer format.
    """
    path = open_model_folder(str(path)).weights if is_model_source(path) else Path(path)
    if path.is_dir():
        path = weights_in(path)
    if not path.is_file():
        raise ValueError(f"there is no checkpoint at {path}")
    content = _read(path, values_only and zipfile.is_zipfile(path), map_location)
    check_tensors(content, path)
    checkpoint = Checkpoint(str(path), content, unlike=check_parts(content, path))
    if values_only:  # unchecked tensors are withheld
        return Checkpoint(str(path), checkpoint.values)
    verify(content, path)
    return checkpoint


def in_memory(tensors: Mapping[str, Tensor], source: str) -> Checkpoint:
    """Return tensors that were read elsewhere as a checkpoint named ``source`` in messages."""
    content = dict(tensors)
    return Checkpoint(source, content, content)


def _read(path: Path, mmap: bool, map_location: Any) -> object:
    try:
        if path.name.endswith(".index.json"):
            return read_sharded(path, lambda shard: _read(shard, mmap, map_location))
        if _is_safetensors(path):
            tensors = safetensors.torch.load_file(path)
            entries = read_entries(path)
            return {"state_dict": dict(sorted(tensors.items())), **entries} if entries else tensors
        _refuse_expansion(path)
        kind = other_kind(path)
        if kind is not None:
            raise UnreadableFile(f"{path} is not a checkpoint but {kind}") from ValueError(kind)
        return read_foreign(path, map_location, mmap=mmap)
    except Exception as error:  # foreign bytes raise errors of all kinds
        names_file = isinstance(error, ValueError) and str(path) in str(error)
        if names_file or isinstance(error, UnreadableFile):
            raise
        raise _unreadable(path, error) from error


def _refuse_expansion(path: Path) -> None:
    """Check that an archive expands to a plausible size, before it is read.

    Raises:
        DamagedCheckpoint: Its entries are many times larger; ``torch.save`` does not compress.
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
    """Return True for the ending, or the first bytes, as in the hub's cache without endings."""
    if path.suffix == ".safetensors":
        return True
    with path.open("rb") as file:
        start = file.read(9)
    return len(start) == 9 and start[8:] == b"{" and int.from_bytes(start[:8], "little") < 2**27


def _refused(path: Path) -> str:
    names = refused_names(path)
    words = f" ({_enumerate(names)})" if names else ""
    return (
        f"{path} holds more than tensors and plain values{words}, or is not a checkpoint; it is "
        "not opened, as it could run code. If you trust it, save its state_dict with safetensors"
    )


def _unreadable(path: Path, error: Exception) -> UnreadableFile:
    if isinstance(error, pickle.UnpicklingError):
        return UnreadableFile(_refused(path))
    reason = f"{type(error).__name__}: {error}"
    return UnreadableFile(f"{path} is truncated or not a checkpoint ({reason})")


def _named_tensors(content: object, checkpoint: Checkpoint) -> dict[str, Tensor]:
    path = checkpoint.path
    objects = objects_in(content) if not _has_tensors(content) else []
    items = content.items() if isinstance(content, dict) else ()
    tensors = {key: value for key, value in items if isinstance(value, Tensor)}
    nameless = [key for key in tensors if not isinstance(key, str)]
    if objects or nameless or not tensors:
        if objects:
            reason = (
                f"holds more than tensors and plain values: whole objects ({_enumerate(objects)}) "
                "instead of weights; save the state_dict of the model"
            )
        elif nameless:
            reason = f"has tensors whose names are not text: {nameless[:8]}"
        elif isinstance(content, dict):
            reason = f"holds no tensors; its entries are {sorted(map(str, content))[:8]}"
        else:
            reason = f"holds a {type(content).__name__}, not a state_dict"
        raise ValueError(f"{path} {reason}")
    return tensors


def _has_tensors(content: object) -> bool:
    return isinstance(content, dict) and any(isinstance(v, Tensor) for v in content.values())


def _holds_tensors(content: object) -> bool:
    """Return True for a dictionary of named tensors, also in a nested container."""
    if not isinstance(content, dict):
        return False
    has_names = any(isinstance(k, str) and isinstance(v, Tensor) for k, v in content.items())
    return has_names or any(_holds_tensors(content.get(name)) for name in CONTAINERS)


def _enumerate(names: Iterable[object], limit: int = 4) -> str:
    words = [str(name) for name in names]
    return ", ".join(words[:limit]) + f" and {len(words) - limit} more" * (len(words) > limit)
