"""Times steps against each other in one process, round by round."""

from __future__ import annotations

import ctypes
import random
import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

WARM_UP = 3
# Parameters of glibc's mallopt.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4

Step = Callable[[], None]


def make_step(model: nn.Module, images: Tensor, kind: str, dtype: torch.dtype) -> Step:
    """What is timed: a forward pass in inference mode, or a forward and backward pass.

    Args:
        model: Made ready for its kind here, not in the step.
        images: (B, 3, H, W), on the model's device.
        kind: "forward" or "training".
        dtype: Of the model itself; in training of autocast.
    """

    def forward() -> None:
        with torch.inference_mode():
            model(images)

    def training() -> None:
        model.zero_grad()
        with torch.autocast(images.device.type, dtype, enabled=dtype is not torch.float32):
            loss = model(images).float().square().mean()
        loss.backward()

    if kind == "training":
        model.train().float()
        return training
    images = images.to(dtype)
    model.eval().to(dtype)
    return forward


def interleave(steps: Sequence[Step], rounds: int, device: str) -> list[list[float]]:
    """Seconds of every step in every round; each round has its own order."""
    timed = _cuda_seconds if device == "cuda" else _cpu_seconds
    for step in steps:
        for _ in range(WARM_UP):
            step()
    seconds: list[list[float]] = [[] for _ in steps]
    for number in range(rounds):
        for index in random.Random(number).sample(range(len(steps)), len(steps)):
            seconds[index].append(timed(steps[index]))
    return seconds


def _cpu_seconds(step: Step) -> float:
    """Wall time of one step."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _cuda_seconds(step: Step) -> float:
    """Time of one step on the GPU, between two events."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed memory for the next allocation; whether there is a glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    return bool(mallopt and mallopt(M_MMAP_MAX, 0) and mallopt(M_TRIM_THRESHOLD, 2**31 - 1))
