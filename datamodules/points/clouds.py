"""Point clouds in memory, and the files that hold them: ply, npy, folders of npy, pth."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Labels = NDArray[np.int64]
IGNORED = -1  # label of points that do not count
LABEL_NAMES = ("label", "class", "scalar_label", "scalar_Label", "scalar_class", "semantic")
PLY_TYPES = {
    "char": "i1", "int8": "i1", "uchar": "u1", "uint8": "u1", "short": "i2", "int16": "i2",
    "ushort": "u2", "uint16": "u2", "int": "i4", "int32": "i4", "uint": "u4", "uint32": "u4",
    "float": "f4", "float32": "f4", "double": "f8", "float64": "f8",
}  # fmt: skip
# Columns of an array (N, columns): what follows the coordinates.
COLUMNS = {
    3: (), 4: ("labels",), 6: ("color",), 7: ("color", "labels"), 9: ("color", "normal"),
    10: ("color", "normal", "labels"),
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Cloud:
    """Points with optional colours, normals and labels.

    Attributes:
        coord: Coordinates in metres (N, 3), in double precision as in the file.
        color: RGB from 0 to 255 (N, 3).
        normal: Unit normals (N, 3).
        labels: Classes (N,); negative ones do not count.
        voxels: Numbers of the points' voxels (N, 3), once the cloud has been sampled by a grid.
    """

    coord: NDArray[np.floating[Any]]
    color: Floats | None = None
    normal: Floats | None = None
    labels: Labels | None = None
    voxels: Labels | None = None

    def __len__(self) -> int:
        return len(self.coord)

    def step(self) -> float:
        """Return the step of the largest coordinate if 32-bit floats hold all of them, else 0."""
        exact = (self.coord == self.coord.astype(np.float32)).all()
        return float(np.spacing(np.float32(np.abs(self.coord).max()))) if exact else 0.0

    def take(self, chosen: Any) -> Cloud:
        """Return some points, by indices or a mask."""
        arrays = (self.coord, self.color, self.normal, self.labels, self.voxels)
        return Cloud(*(None if one is None else one[chosen] for one in arrays))  # type: ignore[arg-type]


def make_cloud(source: object, parts: Mapping[str, Any]) -> Cloud:
    """Return a checked cloud.

    Args:
        source: The file, for messages.
        parts: Arrays named as the fields of ``Cloud``.

    Raises:
        ValueError: An array has another shape, or coordinates that are not finite.
    """
    coord = np.asarray(parts["coord"], dtype=np.float64)
    if coord.ndim != 2 or coord.shape[1] != 3 or not len(coord):
        raise ValueError(f"{source}: coordinates must be (N, 3), got {coord.shape}")
    if not np.isfinite(coord).all():
        raise ValueError(f"{source} has coordinates that are not finite; remove these points")
    arrays: dict[str, Any] = {"coord": coord}
    for name in ("color", "normal"):
        values = parts.get(name)
        if values is not None:
            if np.shape(values) != coord.shape:
                raise ValueError(f"{source}: {name} is {np.shape(values)}, not {coord.shape}")
            arrays[name] = np.asarray(values, dtype=np.float32)
    labels = parts.get("labels")
    if labels is not None:
        labels = np.asarray(labels).reshape(-1)
        if len(labels) != len(coord):
            raise ValueError(f"{source} has {len(labels)} labels for {len(coord)} points")
        arrays["labels"] = labels.astype(np.int64)
    return Cloud(**arrays)


def read_cloud(path: Path, label: str = "segment") -> Cloud:
    """Read a cloud.

    Args:
        path: A .ply, .npy or .pth file, or a folder with coord.npy.
        label: Name of the labels in folders and .pth files.

    Raises:
        ValueError: The file has another format, or lacks an array.
    """
    if path.is_dir():
        return make_cloud(path, _folder_arrays(path, label))
    readers: dict[str, Callable[[], Mapping[str, Any]]] = {
        ".ply": lambda: read_ply(path),
        ".npy": lambda: _columns(path),
        ".pth": lambda: _saved_arrays(path, label),
    }
    if path.suffix not in readers:
        raise ValueError(f"{path} must be a .ply, .npy or .pth file, or a folder with coord.npy")
    return make_cloud(path, readers[path.suffix]())


def _folder_arrays(folder: Path, label: str) -> dict[str, Any]:
    files = {"coord": "coord", "color": "color", "normal": "normal", "labels": label}
    found = {
        name: _load(folder / f"{file}.npy")
        for name, file in files.items()
        if (folder / f"{file}.npy").is_file()
    }
    if "coord" not in found:
        raise ValueError(f"{folder} lacks coord.npy")
    return found


def _load(path: Path) -> Any:
    try:
        return np.load(path, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"{path} is not a readable npy array: {error}") from error


def _columns(path: Path) -> dict[str, Any]:
    values = _load(path)
    if values.ndim != 2 or values.shape[1] not in COLUMNS:
        known = ", ".join(map(str, COLUMNS))
        raise ValueError(
            f"{path} is {values.shape}; an array of points has {known} columns: x y z, then red "
            "green blue, then a normal, then the label"
        )
    parts, place = {"coord": values[:, :3]}, 3
    for name in COLUMNS[values.shape[1]]:
        width = 1 if name == "labels" else 3
        parts[name] = values[:, place : place + width]
        place += width
    return parts


def _saved_arrays(path: Path, label: str) -> dict[str, Any]:
    """Read a .pth file of arrays or tensors, without running code from it."""
    makers = [value.__reduce__()[0] for value in (np.empty(0), np.float64(0))]
    kinds: list[Any] = [np.ndarray, np.dtype, *makers]
    kinds += [type(np.dtype(kind)) for kind in ("f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2")]
    try:
        with torch.serialization.safe_globals(kinds):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises all kinds for foreign files
        raise ValueError(f"{path} is not a .pth file of arrays: {error}") from error
    old = label.replace("segment", "semantic_gt")
    names = {"coord": "coord", "color": "color", "normal": "normal"}
    found = {name: content[key] for name, key in names.items() if key in content}
    key = label if label in content else old
    if key in content:
        found["labels"] = content[key]
    if "coord" not in found:
        raise ValueError(f"{path} lacks the entry coord; it has {', '.join(map(str, content))}")
    return {name: np.asarray(value) for name, value in found.items()}


def read_ply(path: Path) -> dict[str, Any]:
    """Read the vertices of a ply file, in text or binary form.

    Raises:
        ValueError: The file is not a ply file, or lacks coordinates.
    """
    with path.open("rb") as file:
        form, count, fields = _ply_header(path, file)
        if count < 1:
            raise ValueError(f"{path} has no vertices; pass a file with points")
        kind = np.dtype([(name, form + code) for name, code in fields])
        if form:
            vertices = np.fromfile(file, kind, count)
        else:
            rows = [tuple(file.readline().split()[: len(fields)]) for _ in range(count)]
            short = next((at for at, row in enumerate(rows) if len(row) < len(fields)), None)
            if short is not None:
                raise ValueError(f"{path}: vertex {short} has fewer than {len(fields)} numbers")
            try:
                vertices = np.array(rows, dtype="S32").astype("f8")
            except ValueError as error:
                raise ValueError(f"{path}: a vertex is not a row of numbers ({error})") from error
            named = {name: vertices[:, index] for index, (name, _) in enumerate(fields)}
    if len(vertices) != count:
        raise ValueError(f"{path} ends after {len(vertices)} of {count} vertices")
    values = named if not form else {name: vertices[name] for name, _ in fields}
    return _named_parts(path, values)


def _named_parts(path: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    def stack(*names: str) -> Any:
        return np.stack([values[name] for name in names], axis=1).astype(np.float64)

    if not {"x", "y", "z"} <= values.keys():
        raise ValueError(f"{path} lacks x, y and z; its vertices have {', '.join(values)}")
    found = {"coord": stack("x", "y", "z")}
    if {"red", "green", "blue"} <= values.keys():
        found["color"] = stack("red", "green", "blue")
    if {"nx", "ny", "nz"} <= values.keys():
        found["normal"] = stack("nx", "ny", "nz")
    label = next((name for name in LABEL_NAMES if name in values), None)
    if label is not None:
        found["labels"] = values[label]
    return found


def _ply_header(path: Path, file: BinaryIO) -> tuple[str, int, list[tuple[str, str]]]:
    """Return byte order (empty for text), number of vertices, and names and types of fields."""
    if file.readline().strip() != b"ply":
        raise ValueError(f"{path} is not a ply file: its first line differs from 'ply'")
    orders = {"ascii": "", "binary_little_endian": "<", "binary_big_endian": ">"}
    fields: list[tuple[str, str]] = []
    form, count, element = "", 0, ""
    while True:
        words = file.readline().decode("ascii", "replace").split()
        if not words:
            raise ValueError(f"{path}: the header of this ply file ends without end_header")
        if words[0] == "end_header":
            return form, count, fields
        if words[0] == "format":
            form = orders[words[1]]
        elif words[0] == "element":
            if not fields and words[1] != "vertex":
                raise ValueError(f"{path}: the first element must be vertex, got {words[1]}")
            element = words[1]
            count = int(words[2]) if element == "vertex" else count
        elif words[0] == "property" and element == "vertex":
            if words[1] not in PLY_TYPES:
                raise ValueError(f"{path}: vertices have a property of type {words[1]}")
            fields.append((words[2], PLY_TYPES[words[1]]))


def is_cloud(path: Path) -> bool:
    """Return True for a file or folder that ``read_cloud`` takes, by its name."""
    if path.name.startswith("."):
        return False
    return path.suffix in (".ply", ".npy", ".pth") or (path / "coord.npy").is_file()
