"""Generated rooms as coloured clouds with normals, in ScanNet's processed layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from datamodules.base import check_minimum
from datamodules.files.cache import cache_root
from datamodules.points.folders import SCANNET, ScanNetDataModule
from datamodules.sample.base import SampleDataModule

Numbers = NDArray[np.float64]
Box = tuple[tuple[float, float, float], tuple[float, float, float]]  # lowest corner, size
HEIGHT, THICKNESS = 2.4, 0.05
# Colours of classes around which those of instances vary.
HUES = {
    "wall": (205, 200, 190), "floor": (140, 110, 80), "cabinet": (170, 150, 120),
    "bed": (120, 140, 190), "chair": (110, 80, 60), "sofa": (150, 70, 70), "table": (160, 120, 70),
    "door": (120, 85, 55), "window": (170, 205, 230), "bookshelf": (130, 95, 60),
}  # fmt: skip


class SamplePoints(SampleDataModule, ScanNetDataModule):
    """Rooms with floor, walls, a door, a window and six kinds of furniture.

    Args:
        root: Folder of all sample datasets; None means ``$MIXERLAB_CACHE`` or
            ``~/.cache/mixerlab``.
        num_train: Rooms to train with.
        num_val: Rooms to validate with.
        density: Points per square metre.
        sample_seed: Seed of the generated rooms.
        options: Options of ``ScanNetDataModule``.
    """

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        num_train: int = 30,
        num_val: int = 6,
        density: int = 300,
        sample_seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(None, **options)
        self.base = Path(root).expanduser() if root is not None else cache_root()
        self.counts = {
            "train": check_minimum("num_train", num_train, 1),
            "val": check_minimum("num_val", num_val, 1),
        }
        self.density = check_minimum("density", density, 1)
        self.sample_seed = check_minimum("sample_seed", sample_seed, 0)
        self.set_name = f"rooms-{density}-{num_train}-{num_val}-seed{sample_seed}"

    def write(self, folder: Path) -> None:
        """Write a folder of arrays per room."""
        for number, (split, count) in enumerate(self.counts.items()):
            for index in range(count):
                scene = folder / split / f"room{index:03d}"
                scene.mkdir(parents=True)
                arrays = make_room((self.sample_seed, number, index), self.density)
                for name, values in arrays.items():
                    np.save(scene / f"{name}.npy", values)


def make_room(seed: tuple[int, ...], density: int) -> dict[str, NDArray[Any]]:
    """Return ``coord``, ``color``, ``normal`` and ``segment20`` of a furnished room."""
    random = np.random.default_rng(seed)
    width, depth = random.uniform(3.5, 6.0, 2)
    parts = [_shell(random, width, depth, density)]
    places_taken: list[tuple[float, float, float, float]] = []
    for _ in range(random.integers(6, 11)):
        kind = str(random.choice(list(FURNITURE)))
        boxes = FURNITURE[kind](random)
        placed = _place(random, boxes, (width, depth), places_taken)
        if placed is not None:
            parts.append(_surface(random, placed, kind, density))
    columns = [np.concatenate(columns_of) for columns_of in zip(*parts, strict=True)]
    coord = columns[0] + random.normal(0, 0.004, columns[0].shape)
    return {
        "coord": coord.astype(np.float32),
        "color": columns[1].clip(0, 255).astype(np.uint8),
        "normal": columns[2].astype(np.float32),
        "segment20": columns[3].astype(np.int16),
    }


def _shell(
    random: np.random.Generator, width: float, depth: float, density: int
) -> tuple[Numbers, ...]:
    """Return floor and walls with a door and a window in them."""
    floor: Box = ((0, 0, -THICKNESS), (width, depth, THICKNESS))
    walls: list[Box] = [
        ((-THICKNESS, 0, 0), (THICKNESS, depth, HEIGHT)),
        ((width, 0, 0), (THICKNESS, depth, HEIGHT)),
        ((0, -THICKNESS, 0), (width, THICKNESS, HEIGHT)),
        ((0, depth, 0), (width, THICKNESS, HEIGHT)),
    ]
    inside = np.array([width, depth, HEIGHT])
    kinds = [("floor", [floor]), *(("wall", [wall]) for wall in walls)]
    parts = [_inner(_surface(random, boxes, kind, 2 * density), inside) for kind, boxes in kinds]
    openings: list[tuple[str, Numbers, Numbers]] = []
    for kind, low, size in (("door", 0.0, (0.9, 2.0)), ("window", 0.9, (1.3, 1.0))):
        axis = int(random.integers(2))  # the wall runs along x or y
        length = (width, depth)[axis]
        along = random.uniform(0.2, length - size[0] - 0.2)
        start, extent = np.zeros(3), np.zeros(3)
        start[axis], extent[axis] = along, size[0]
        start[2], extent[2] = low, size[1]
        side = random.integers(2) if kind == "door" else 1
        start[1 - axis] = side * (depth, width)[axis]
        openings.append((kind, start, start + extent))
    points = [np.concatenate(columns_of) for columns_of in zip(*parts, strict=True)]
    for kind, low_corner, high_corner in openings:
        inner = ((points[0] >= low_corner - 0.02) & (points[0] <= high_corner + 0.02)).all(1)
        points[3][inner] = SCANNET.index(kind)
        base = np.array(HUES[kind]) + random.normal(0, 12, 3)
        points[1][inner] = base + random.normal(0, 6, (int(inner.sum()), 3))
    return tuple(points)


def _inner(points: tuple[Numbers, ...], inside: Numbers) -> tuple[Numbers, ...]:
    """Keep the points of a wall or floor that face the room."""
    coord, _, normal, _ = points
    ahead = coord + 0.02 * normal
    facing = ((ahead > 0) & (ahead < inside)).all(1)
    return tuple(columns_of[facing] for columns_of in points)


def _surface(
    random: np.random.Generator, boxes: list[Box], kind: str, density: int
) -> tuple[Numbers, ...]:
    """Draw points on the faces of boxes: coordinates, colours, normals, labels."""
    base = np.array(HUES[kind]) + random.normal(0, 18, 3)
    coords, normals = [], []
    for corner, size in boxes:
        sides = np.array(size)
        for axis in range(3):
            area = sides.prod() / sides[axis]
            for end in (0, 1):
                places = random.random((random.poisson(area * density), 3)) * sides
                places[:, axis] = end * sides[axis]
                coords.append(places + corner)
                normals.append(np.tile((2 * end - 1) * np.eye(3)[axis], (len(places), 1)))
    coord = np.concatenate(coords)
    color = base + random.normal(0, 8, coord.shape)
    labels = np.full(len(coord), SCANNET.index(kind), dtype=np.float64)
    return coord, color, np.concatenate(normals), labels


def _place(
    random: np.random.Generator,
    boxes: list[Box],
    room: tuple[float, float],
    obstacles: list[tuple[float, float, float, float]],
) -> list[Box] | None:
    """Turn furniture by quarters and move it to a free place; None if all are taken."""
    for _ in range(random.integers(4)):
        boxes = [
            ((-corner[1] - size[1], corner[0], corner[2]), (size[1], size[0], size[2]))
            for corner, size in boxes
        ]
    corners = np.array([corner for corner, _ in boxes])
    ends = corners + np.array([size for _, size in boxes])
    low, extent = corners.min(0), ends.max(0) - corners.min(0)
    for _ in range(20):
        if (extent[:2] >= np.array(room) - 0.2).any():
            return None
        x, y = random.uniform(0.05, np.array(room) - extent[:2] - 0.05)
        box = (x, y, x + extent[0], y + extent[1])
        if all(box[0] > b[2] or box[2] < b[0] or box[1] > b[3] or box[3] < b[1] for b in obstacles):
            obstacles.append(box)
            shift = np.array([x, y, 0]) - [low[0], low[1], 0]
            return [(tuple(np.array(corner) + shift), size) for corner, size in boxes]
    return None


def _legs(width: float, depth: float, height: float, side: float = 0.06) -> list[Box]:
    return [((x, y, 0), (side, side, height)) for x in (0, width - side) for y in (0, depth - side)]


def _table(random: np.random.Generator) -> list[Box]:
    width, depth, height = random.uniform((0.9, 0.7, 0.68), (1.8, 1.0, 0.78))
    return [*_legs(width, depth, height), ((0, 0, height), (width, depth, 0.05))]


def _chair(random: np.random.Generator) -> list[Box]:
    side, height = random.uniform(0.4, 0.5), random.uniform(0.42, 0.48)
    seat: Box = ((0, 0, height), (side, side, 0.05))
    back: Box = ((0, 0, height + 0.05), (side, 0.05, random.uniform(0.4, 0.55)))
    return [*_legs(side, side, height, 0.04), seat, back]


def _bed(random: np.random.Generator) -> list[Box]:
    width, height = random.uniform(0.9, 1.8), random.uniform(0.4, 0.55)
    return [((0, 0, 0), (width, 2.0, height)), ((0, -0.06, 0), (width, 0.06, height + 0.45))]


def _sofa(random: np.random.Generator) -> list[Box]:
    width = random.uniform(1.4, 2.2)
    arms: list[Box] = [((x, 0, 0), (0.18, 0.85, 0.6)) for x in (0, width - 0.18)]
    return [((0.18, 0, 0), (width - 0.36, 0.85, 0.42)), ((0, -0.2, 0), (width, 0.2, 0.85)), *arms]


def _cabinet(random: np.random.Generator) -> list[Box]:
    width, depth, height = random.uniform((0.6, 0.4, 0.8), (1.4, 0.6, 1.2))
    return [((0, 0, 0), (width, depth, height))]


def _bookshelf(random: np.random.Generator) -> list[Box]:
    width, height = random.uniform(0.7, 1.2), random.uniform(1.7, 2.1)
    sides: list[Box] = [((x, 0, 0), (0.03, 0.3, height)) for x in (0, width - 0.03)]
    levels = np.linspace(0, height - 0.03, 6)
    shelves: list[Box] = [((0, 0, float(z)), (width, 0.3, 0.03)) for z in levels]
    return [*sides, *shelves, ((0, -0.02, 0), (width, 0.02, height))]


FURNITURE = {
    "table": _table, "chair": _chair, "bed": _bed, "sofa": _sofa, "cabinet": _cabinet,
    "bookshelf": _bookshelf,
}  # fmt: skip
