"""Augmentation of point clouds in training, drawn from numpy's global generator.

Source: the ScanNet configuration of FFNet's authors (github.com/ysj9909/FFNet), which is that of
Pointcept (github.com/Pointcept/Pointcept).
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from datamodules.points.clouds import Cloud

Numbers = NDArray[np.float64]
Integers = NDArray[np.int64]
SCALE = (0.9, 1.1)
TILT = 1 / 64  # of pi, about the horizontal axes
JITTER, JITTER_LIMIT = 0.005, 0.02  # metres
ELASTIC = ((0.2, 0.4), (0.8, 1.6))  # granularity and magnitude in metres
ELASTIC_SHARE = 0.95


def centred(cloud: Cloud, *, floor: bool = True) -> Cloud:
    """Return a cloud with the middle of its box at x = y = 0, and its lowest point at z = 0.

    The offset, which may be that of a national grid, is subtracted in double precision.
    """
    low, high = cloud.coord.min(0), cloud.coord.max(0)
    shift = np.append((low + high)[:2].astype(np.float64) / 2, low[2] if floor else 0)
    return dataclasses.replace(cloud, coord=(cloud.coord - shift).astype(np.float32))


def augment(cloud: Cloud, *, elastic: bool = True, drop: float = 0.2) -> Cloud:
    """Return a cloud with points left out, rotated, scaled, flipped, shifted and recoloured.

    Args:
        cloud: Centred.
        elastic: Distort it smoothly.
        drop: Share of points that are left out of every fifth cloud.
    """
    if drop and _chance(0.2):
        indices = np.random.permutation(len(cloud))[: max(1, round(len(cloud) * (1 - drop)))]
        cloud = cloud.take(indices)
    for axis, most in ((2, 1.0), (0, TILT), (1, TILT)):
        if _chance(0.5):
            cloud = rotated(cloud, axis, np.pi * np.random.uniform(-most, most))
    cloud = dataclasses.replace(cloud, coord=cloud.coord * np.float32(np.random.uniform(*SCALE)))
    for axis in (0, 1):
        if _chance(0.5):
            cloud = flipped(cloud, axis)
    noise = np.random.normal(0, JITTER, cloud.coord.shape).clip(-JITTER_LIMIT, JITTER_LIMIT)
    coord = cloud.coord + noise
    if elastic and _chance(ELASTIC_SHARE):
        for granularity, magnitude in ELASTIC:
            coord = distorted(coord, granularity, magnitude)
    color = None if cloud.color is None else _recoloured(cloud.color)
    return dataclasses.replace(cloud, coord=coord.astype(np.float32), color=color)


def _chance(share: float) -> bool:
    return bool(np.random.random() < share)


def rotated(cloud: Cloud, axis: int, angle: float) -> Cloud:
    """Rotate points and normals about an axis through the origin, by an angle in radians."""
    cos, sin = np.cos(angle), np.sin(angle)
    matrix, (first, second) = (
        np.eye(3),
        [axis_number for axis_number in range(3) if axis_number != axis],
    )
    matrix[first, first] = matrix[second, second] = cos
    matrix[first, second], matrix[second, first] = -sin, sin

    def turn(rows: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
        return (rows @ matrix.T).astype(np.float32)

    normal = None if cloud.normal is None else turn(cloud.normal)
    return dataclasses.replace(cloud, coord=turn(cloud.coord), normal=normal)


def flipped(cloud: Cloud, axis: int) -> Cloud:
    """Mirror points and normals along an axis."""
    sign = np.ones(3, dtype=np.float32)
    sign[axis] = -1
    normal = None if cloud.normal is None else cloud.normal * sign
    return dataclasses.replace(cloud, coord=cloud.coord * sign, normal=normal)


def distorted(coord: NDArray[np.floating], granularity: float, magnitude: float) -> Numbers:
    """Shift points by smooth noise; memory is in proportion to the points.

    Args:
        coord: (N, 3).
        granularity: Distance of the noise's nodes in metres.
        magnitude: Deviation of the noise before smoothing, in metres.
    """
    low = coord.min(0)
    counts = ((coord - low).max(0) // granularity).astype(int) + 3
    # The first node of each axis lies one step before the points.
    position = (coord - low) / granularity + 1
    cells = np.floor(position).astype(np.int64)
    keys, index = np.unique(_keys(cells, counts), return_index=True)
    node_keys, noise = _smooth_noise(cells[index], counts)
    cell, fraction = np.searchsorted(keys, _keys(cells, counts)), position - cells
    shift = np.zeros(coord.shape)
    for corner in itertools.product((0, 1), repeat=3):
        node = np.searchsorted(node_keys, keys + _keys(np.array(corner), counts))
        weight = np.where(corner, fraction, 1 - fraction).prod(1, keepdims=True)
        shift += weight * noise[node][cell]
    return coord + shift * magnitude


def _smooth_noise(cells: Integers, counts: Integers) -> tuple[Integers, Numbers]:
    """Return sorted keys of the corners of cells, and noise averaged twice along each axis.

    Noise is drawn for the nodes that take part, of a grid with zeros around it.
    """
    corners: Integers = np.array(list(itertools.product((0, 1), repeat=3)))
    steps: list[Integers] = [np.outer((-1, 0, 1), axis) for axis in (*np.eye(3, dtype=int),) * 2]
    levels = [_nodes(cells, corners, counts)]
    for along in steps:
        levels.append(_nodes(levels[-1], along, counts))
    noise = np.random.normal(size=(len(levels[-1]), 3))
    for along in reversed(steps):
        keys, padded = _keys(levels.pop(), counts), np.vstack([noise, np.zeros(3)])
        noise = np.zeros((len(levels[-1]), 3))
        for step in along:
            at = levels[-1] + step
            inside = ((at >= 0) & (at < counts)).all(1)
            place = np.where(inside, np.searchsorted(keys, _keys(at, counts)), len(keys))
            noise += padded[place] / len(along)
    return _keys(levels[0], counts), noise


def _nodes(nodes: Integers, steps: Integers, counts: Integers) -> Integers:
    """Return all nodes within the grid that are one of some steps away, in the order of keys."""
    near: Integers = (nodes[:, None] + steps).reshape(-1, 3)
    near = near[((near >= 0) & (near < counts)).all(1)]
    return near[np.unique(_keys(near, counts), return_index=True)[1]]


def _keys(nodes: Integers, counts: Integers) -> Integers:
    """Return the numbers of nodes in a grid: (..., 3) -> (...)."""
    keys: Integers = (nodes[..., 0] * counts[1] + nodes[..., 1]) * counts[2] + nodes[..., 2]
    return keys


def _recoloured(color: NDArray[np.float32]) -> NDArray[np.float32]:
    """Stretch the contrast, shift and jitter colours from 0 to 255."""
    values: Numbers = color.astype(np.float64)
    if _chance(0.2):
        low, high = values.min(0), values.max(0)
        stretched = (values - low) * (255 / np.maximum(high - low, 1))
        blend = np.random.random()
        values = (1 - blend) * values + blend * stretched
    if _chance(0.95):
        values += (np.random.random(3) - 0.5) * 255 * 2 * 0.05
    if _chance(0.95):
        values += np.random.normal(size=color.shape) * 0.05 * 255
    return values.clip(0, 255).astype(np.float32)


@dataclass(frozen=True)
class Crop:
    """The nearest points to a random one.

    Attributes:
        points: Most points to keep.
    """

    points: int

    def __call__(self, cloud: Cloud) -> Cloud:
        """Return the nearest points to a random one of the cloud."""
        if len(cloud) <= self.points:
            return cloud
        centre = cloud.coord[np.random.randint(len(cloud))]
        distances = ((cloud.coord - centre) ** 2).sum(1)
        return cloud.take(np.argpartition(distances, self.points - 1)[: self.points])


def grid_sample(cloud: Cloud, grid_size: float) -> Cloud:
    """Return one random point of each occupied voxel, with the voxels' numbers."""
    voxels = np.floor(cloud.coord / grid_size).astype(np.int64)
    voxels -= voxels.min(0)
    sides = voxels.max(0) + 1
    keys = (voxels[:, 0] * sides[1] + voxels[:, 1]) * sides[2] + voxels[:, 2]
    order = np.random.permutation(len(cloud))
    _, first = np.unique(keys[order], return_index=True)
    return dataclasses.replace(cloud, voxels=voxels).take(order[first])
