"""Peak memory of a step, beyond what was allocated before it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.autograd.profiler import profile

from tools.bench.timing import Step


def measure_peaks(steps: Iterable[Step], networks: Sequence[nn.Module], device: str) -> list[int]:
    """Measure the peak of each step, without gradients of earlier steps."""
    peaks = []
    for step in steps:
        for network in networks:
            network.zero_grad()
        peaks.append(measure_peak(step, device))
    return peaks


def measure_peak(step: Step, device: str) -> int:
    """Return the peak of all tensor bytes during a step, without the weights.

    Counts activations, gradients and working memory exactly, as torch's allocators report them.
    Memory that libraries allocate themselves is invisible.

    Args:
        step: Must have run once before, and gradients of earlier steps must be gone.
        device: "cpu" or "cuda".
    """
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences the profiler's messages
    with profile(profile_memory=True) as record:
        step()
    events = [e for e in record.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak
