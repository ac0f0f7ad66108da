"""The memory that a step takes at its height, beyond what was there before it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.autograd.profiler import profile

from tools.bench.timing import Step


def peaks_of(steps: Iterable[Step], networks: Sequence[nn.Module], device: str) -> list[int]:
    """``peak_bytes`` of each step, to which those before it have left no gradients."""
    peaks = []
    for step in steps:
        for network in networks:
            network.zero_grad()
        peaks.append(peak_bytes(step, device))
    return peaks


def peak_bytes(step: Step, device: str) -> int:
    """Bytes of all tensors of one step at the moment when they are most, without the weights.

    Counted are activations, gradients and working memory of operations, exactly, as torch's
    allocators hand them out; what a library takes for itself is not seen.

    Args:
        step: Has run before, so that nothing is made for the first time; gradients of an earlier
            step are to be gone.
        device: "cpu" or "cuda".
    """
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler tells when it begins and ends
    with profile(profile_memory=True) as record:
        step()
    events = [e for e in record.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak
