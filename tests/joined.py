"""Threads that exchange sums like the processes of a run."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import torch

from heads import global_mean


def run_joined(functions, monkeypatch):
    """Call the functions at the same time, each as a process of one group; return their results.

    A process that waits for others that exchange nothing fails after some seconds.
    """
    barrier = threading.Barrier(len(functions), timeout=20)
    given = []

    def all_reduce(tensor):
        given.append(tensor.clone())
        barrier.wait()
        total = torch.stack(given).sum(0)
        if not barrier.wait():
            given.clear()
        barrier.wait()
        tensor.copy_(total)

    group = SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: True, all_reduce=all_reduce,
        get_world_size=lambda: len(functions),
    )  # fmt: skip
    monkeypatch.setattr(global_mean, "dist", group)
    with ThreadPoolExecutor(len(functions)) as pool:
        return [future.result() for future in [pool.submit(call) for call in functions]]
