"""File of weights in a folder: of a run, the Hugging Face hub, timm's script or an export."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

RUN = "checkpoints/best.ckpt"
# Conventional names, best first; an index lists the files of one model.
USUAL = (
    "model.safetensors",
    "model.safetensors.index.json",
    "open_clip_model.safetensors",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "model_best.pth.tar",
)
ENDINGS = (".safetensors", ".pth", ".pt", ".ckpt", ".bin", ".pth.tar")
# Files of other formats, with the origin of their folder.
OTHERS = {
    "*.onnx": "an export to ONNX, which has no readable weights",
    "*.pt2": "an export by torch.export, which has no readable weights",
    "*.distcp": "a checkpoint of several processes; join it by `python -m "
    "torch.distributed.checkpoint.format_utils dcp_to_torch <folder> <file>`",
    "flax_model.msgpack": "a model of Flax",
    "tf_model.h5": "a model of TensorFlow",
}


def find_weights(folder: Path) -> Path | None:
    """Return the file of weights in a folder; None if all files are unknown.

    Raises:
        ValueError: Several files, or one of another kind.
    """
    snapshot = folder / "refs" / "main"  # of the hub's cache
    if snapshot.is_file():
        revision = snapshot.read_text(encoding="utf-8", errors="replace")[:64].strip()
        inside = folder / "snapshots" / Path(revision).name
        return find_weights(inside) if inside.is_dir() else None
    for name in (RUN, *USUAL):
        if (folder / name).is_file():
            return folder / name
    return _only_file(folder) or (_only_file(folder / "checkpoints"))


def weights_in(folder: Path) -> Path:
    """Return the file of weights in a folder.

    Raises:
        ValueError: The folder lacks one, or has several.
    """
    file = find_weights(folder)
    if file is None:
        raise ValueError(f"there is no checkpoint at {folder}; pass the file itself")
    return file


def _only_file(folder: Path) -> Path | None:
    files = sorted(path for path in folder.glob("*") if path.name.endswith(ENDINGS))
    files = [path for path in files if path.is_file()]
    by_stem = {path.name.partition(".")[0]: path for path in reversed(files)}
    if len(by_stem) > 1:
        names = ", ".join(path.name for path in files[:6]) + ", ..." * (len(files) > 6)
        raise ValueError(f"{folder} holds several checkpoints ({names}); pass one of them")
    if by_stem:
        safetensors_files = [path for path in files if path.suffix == ".safetensors"]
        return (safetensors_files or files)[0]
    for pattern, kind in OTHERS.items():
        if any(folder.glob(pattern)):
            raise ValueError(f"{folder} is {kind}; pass its original checkpoint")
    return None


def read_sharded(index: Path, read: Callable[[Path], Any]) -> dict[str, Any]:
    """Read the tensors of a model in several files.

    Args:
        index: The file that names the others.
        read: Reads a file.

    Raises:
        ValueError: The index is invalid, or a file is missing or outside the folder.
    """
    try:
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        names = sorted(set(files))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index} is not an index of weights; it lacks weight_map") from error
    content: dict[str, Any] = {}
    for name in names:
        shard = index.parent / str(name)
        if not isinstance(name, str) or Path(name).name != name or not shard.is_file():
            raise ValueError(f"{index} names {str(name)!r}, which is missing from its folder")
        content |= read(shard)
    return content
