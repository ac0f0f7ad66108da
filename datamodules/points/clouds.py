"""Point clouds in memory, and the files that hold them: ply, npy, folders of npy, pth."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray

from datamodules.files.values import refuse

Floats = NDArray[np.float32]
Labels = NDArray[np.int64]
IGNORED = -1  # label of points that do not count
LAST_COLUMN = "in an array of 4, 7 or 10 columns the last one is the label"
# Properties of ply's vertices, in small letters and without CloudCompare's "scalar_".
PROPERTIES: dict[str, list[tuple[str, ...]]] = {
    "coord": [("x", "y", "z")],
    "color": [("red", "green", "blue"), ("r", "g", "b")],
    "normal": [("nx", "ny", "nz")],
    "labels": [(name,) for name in ("label", "class", "semantic", "classification")],
}
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
        remark: What a user should know about the file.
        voxels: Numbers of the points' voxels (N, 3), once the cloud has been sampled by a grid.
    """

    coord: NDArray[np.floating[Any]]
    color: Floats | None = None
    normal: Floats | None = None
    labels: Labels | None = None
    voxels: Labels | None = None
    remark: str = ""

    def __len__(self) -> int:
        return len(self.coord)

    def step(self) -> float:
        """Return the step of the largest coordinate if 32-bit floats hold all of them, else 0."""
        exact = (self.coord == self.coord.astype(np.float32)).all()
        return float(np.spacing(np.float32(np.abs(self.coord).max()))) if exact else 0.0

    def take(self, index: Any) -> Cloud:
        """Return some points, by indices or a mask."""
        arrays = (self.coord, self.color, self.normal, self.labels, self.voxels)
        return Cloud(*(None if array is None else array[index] for array in arrays))  # type: ignore[arg-type]


def read_cloud(path: Path, label: str = "segment") -> Cloud:
    """Read a cloud.

    Args:
        path: A .ply, .npy or .pth file, or a folder with coord.npy.
        label: Name of the labels in folders and .pth files.

    Raises:
        ValueError: The file has another format, lacks an array, or holds unusable numbers.
    """
    readers: dict[str, Callable[[Path, str], Mapping[str, Any]]] = {
        ".ply": _ply_arrays, ".npy": _columns, ".pth": _saved_arrays,
    }  # fmt: skip
    reader = _folder_arrays if path.is_dir() else readers.get(path.suffix)
    if reader is None:
        raise ValueError(f"{path} must be a .ply, .npy or .pth file, or a folder with coord.npy")
    try:
        return _make_cloud(reader(path, label))
    except Exception as error:  # numpy and torch raise all kinds for foreign files
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__} "
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path} is not a readable cloud: {kind}{reason}") from error


def _make_cloud(parts: Mapping[str, Any]) -> Cloud:
    """Return a checked cloud of arrays that are named as its fields."""
    coord = np.asarray(parts.get("coord", ()), dtype=np.float64)
    arrays: dict[str, Any] = {"coord": coord}
    for name in ("color", "normal"):
        if name in parts:
            arrays[name] = np.asarray(parts[name], dtype=np.float32)
    refuse(
        "",
        {
            "it lacks coordinates (x, y, z in ply, coord elsewhere)": "coord" not in parts,
            f"coordinates must be (N, 3) with points, got {coord.shape}": (
                coord.ndim != 2 or coord.shape[1] != 3 or not len(coord)
            ),
            f"all arrays must have the shape {coord.shape}, unlike": [
                name for name, values in arrays.items() if values.shape != coord.shape
            ],
            "numbers are not finite at some points (remove these points)": [
                name for name, values in arrays.items() if not np.isfinite(values).all()
            ],
        },
    )
    if "labels" in parts:
        arrays["labels"] = _labels(parts["labels"], len(coord))
    if "color" in arrays:
        arrays["color"], arrays["remark"] = _bytes_of(arrays["color"])
    return Cloud(**arrays)


def _labels(values: Any, count: int) -> Labels:
    labels = np.asarray(values, dtype=np.float64).reshape(-1)
    odd = labels[~(np.isfinite(labels) & (labels == np.rint(labels)))]
    faults = {
        f"has {len(labels)} labels for {count} points": len(labels) != count,
        f"labels must be whole numbers ({LAST_COLUMN}), got": odd[:1].tolist(),
    }
    refuse("", faults)
    return labels.astype(np.int64)


def _bytes_of(color: Floats) -> tuple[Floats, str]:
    """Return colours from 0 to 255, and a remark if the file has them from 0 to 1 or in 16 bits."""
    low, high, integral = color.min(), color.max(), bool((color == np.rint(color)).all())
    if 0 <= low and high <= 1 and not integral:
        return color * 255, "its colours are from 0 to 1 and are multiplied by 255"
    if 0 <= low and 255 < high < 2**16 and integral:
        return color / np.float32(
            257
        ), "its colours exceed 255; they count as 16 bits and are divided by 257"
    rule = f"colours must be from 0 to 255, to 1 or to 65535, got {low:g} to {high:g}"
    refuse("", {rule: low < 0 or high > 255})
    return color, ""


def _folder_arrays(folder: Path, label: str) -> dict[str, Any]:
    files = {"coord": "coord", "color": "color", "normal": "normal", "labels": label}
    return {
        name: np.load(folder / f"{file}.npy", allow_pickle=False)
        for name, file in files.items()
        if (folder / f"{file}.npy").is_file()
    }


def _columns(path: Path, _: str) -> dict[str, Any]:
    values = np.load(path, allow_pickle=False)
    rule = (
        f"its shape is {values.shape}; an array of points has {', '.join(map(str, COLUMNS))} "
        "columns: x y z, then red green blue, then a normal, then the label"
    )
    refuse("", {rule: values.ndim != 2 or values.shape[1] not in COLUMNS})
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
    with torch.serialization.safe_globals(kinds):
        content = torch.load(path, map_location="cpu", weights_only=True)
    old_key = label.replace("segment", "semantic_gt")
    keys = {"coord": "coord", "color": "color", "normal": "normal"}
    keys["labels"] = label if label in content else old_key
    return {name: content[key] for name, key in keys.items() if key in content}


def _ply_arrays(path: Path, _: str) -> dict[str, Any]:
    """Read the vertices of a ply file, in text or binary form."""
    with path.open("rb") as file:
        form, count, fields = _ply_header(file)
        if form:
            kind = np.dtype([(name, form + code) for name, code in fields])
            vertices = np.fromfile(file, kind)[:count]
            values = {name: vertices[name] for name, _ in fields}
        else:
            rows = [line.split()[: len(fields)] for line in itertools.islice(file, count)]
            cut_rows = [at for at, row in enumerate(rows) if len(row) < len(fields)]
            refuse("", {f"has vertices with fewer than {len(fields)} numbers": cut_rows})
            vertices = np.array(rows, dtype="S32").astype("f8").reshape(len(rows), len(fields))
            values = {name: vertices[:, index] for index, (name, _) in enumerate(fields)}
    refuse("", {f"it ends after {len(vertices)} of {count} vertices": len(vertices) != count})
    return _named_parts(values)


def _named_parts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a cloud by the names of vertex properties, as any tool writes them."""
    # Of two names that differ in case or CloudCompare's prefix alone, the first one counts.
    by_name = {name.lower().removeprefix("scalar_"): name for name in reversed([*values])}
    parts = {}
    for part, choices in PROPERTIES.items():
        names = next((array for array in choices if {*array} <= by_name.keys()), None)
        if names is not None:
            arrays = [values[by_name[name]] for name in names]
            parts[part] = np.stack(arrays, axis=1).astype(np.float64)
    return parts


def _ply_header(file: BinaryIO) -> tuple[str, int, list[tuple[str, str]]]:
    """Return byte order (empty for text), number of vertices, and names and types of fields."""
    refuse("", {"its first line differs from 'ply'": file.readline().strip() != b"ply"})
    orders = {"ascii": "", "binary_little_endian": "<", "binary_big_endian": ">"}
    fields: list[tuple[str, str]] = []
    form, count, element = "", 0, ""
    while True:
        words = file.readline().decode("ascii", "replace").split()
        refuse("", {"its header ends without end_header": not words})
        if words[0] == "end_header":
            return form, count, fields
        if words[0] == "format":
            form = orders[words[1]]
        elif words[0] == "element":
            is_other = not fields and words[1] != "vertex"
            refuse("", {f"its first element must be vertex, got {words[1]}": is_other})
            element = words[1]
            count = int(words[2]) if element == "vertex" else count
        elif words[0] == "property" and element == "vertex":
            fields.append((words[2], PLY_TYPES[words[1]]))


def is_cloud(path: Path) -> bool:
    """Return True for a file or folder that ``read_cloud`` takes, by its name."""
    if path.name.startswith("."):
        return False
    return path.suffix in (".ply", ".npy", ".pth") or (path / "coord.npy").is_file()
