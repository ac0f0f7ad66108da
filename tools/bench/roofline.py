"""Least time of a mixer's step, by its multiply-adds and bytes and what the device reaches.

Bytes are those that must cross the device's memory: the input, the output and the parameters once
in a forward pass. Training also moves both gradients of the maps, those of the parameters, and
input and parameters a second time. Maps and states between input and output are left out, since a
single kernel could keep them on the chip.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tools.bench.timing import interleave
from tools.cli.typed_network import Network

# Side of the product and bytes of the copy that show the peaks.
SIDES = {"cpu": 1024, "cuda": 8192}
COPIES = {"cpu": 2**26, "cuda": 2**29}
ROUNDS = 5
MAPS = {"forward": 2, "training": 5}
PARAMETERS = {"forward": 1, "training": 3}
PASSES = {"forward": 1, "training": 3}  # the gradients of both factors are products, too


class Work(NamedTuple):
    """Multiply-adds and bytes of a step, or of a second on a device."""

    macs: float
    bytes: float


def count_work(
    mixer: Network, dim: int, size: tuple[int, int], batch: int, kind: str, dtype: torch.dtype
) -> Work:
    """Return the work of a step of a token mixer.

    Args:
        mixer: Its name and options.
        dim: Channels.
        size: (H, W).
        batch: Images.
        kind: "forward" or "training".
        dtype: Of the maps; training keeps parameters in float32.
    """
    from backbones import create_mixer
    from backbones.analysis.counting import count_macs, count_parameters

    name, options = mixer
    with torch.device("meta"):
        built = create_mixer(name, dim, grid=size, **options)
    parameter_dtype = torch.float32 if kind == "training" else dtype
    maps = MAPS[kind] * batch * size[0] * size[1] * dim * dtype.itemsize
    parameters = PARAMETERS[kind] * count_parameters(built) * parameter_dtype.itemsize
    macs = PASSES[kind] * batch * count_macs(built, shape=(*size, dim))
    return Work(macs, maps + parameters)


def measure_device(device: str, dtype: torch.dtype, clock: str) -> Work:
    """Return the multiply-adds and bytes per second of a large product and a copy."""
    side, length = SIDES[device], COPIES[device] // dtype.itemsize
    a, b = torch.randn(2, side, side, device=device).to(dtype)
    source, target = torch.zeros(2, length, device=device, dtype=dtype)
    product = torch.empty_like(a)
    steps = [lambda: torch.mm(a, b, out=product), lambda: target.copy_(source)]
    product_seconds, copy_seconds = interleave(steps, ROUNDS, device, clock)
    return Work(side**3 / min(product_seconds), 2 * COPIES[device] / min(copy_seconds))


def least_seconds(work: Work, device: Work) -> float:
    """Return the time of whichever takes longer, operations or bytes."""
    return max(work.macs / device.macs, work.bytes / device.bytes)
