"""Time steps against each other in one process, in interleaved rounds."""

from __future__ import annotations

import functools
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from backbones.fast import status
from backbones.fast.triton.choice import try_all
from tools.cli.arguments import parse_integer
from tools.runs.freed_memory import keep_freed_memory

WARM_UP = 3
WARM_UPS = {"cpu": WARM_UP, "cuda": 20}  # steps before those that are timed

Step = Callable[[], None]
Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "process": time.process_time}


def set_up_process(options: Mapping[str, str]) -> torch.dtype:
    """Set up the process by the options, print the setup, and return the dtype.

    Raises:
        ValueError: The device is missing, or an option does not apply to it.
    """
    if options["device"] == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda needs a GPU, but torch finds none; pass device=cpu")
    if options["device"] == "cuda" and options["clock"] != "wall":
        raise ValueError("device=cuda always uses the GPU's own events; leave clock= out")
    if options["device"] != "cuda" and options.get("cuda_graphs") == "true":
        raise ValueError("cuda_graphs=true needs a GPU; pass device=cuda too")
    if options["threads"]:
        torch.set_num_threads(parse_integer("threads", options["threads"]))
    keeps_memory = options["keep_memory"] == "true" and keep_freed_memory()
    device, dtype = "cpu", getattr(torch, options["dtype"])
    if options["device"] == "cuda":
        device = torch.cuda.get_device_name()
        try_all(torch.device("cuda", torch.cuda.current_device()))
    print_status(
        f"{device}, threads {torch.get_num_threads()}, {options['dtype']}, "
        f"torch {torch.__version__}, freed memory "
        f"{'kept' if keeps_memory else 'returned to the system'}; {status()}"
    )
    return dtype


def record_cuda_graph(step: Step) -> Step:
    """Record a step as a CUDA graph, which replays its launches without time in Python."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def make_step(model: nn.Module, images: Tensor, kind: str, dtype: torch.dtype) -> Step:
    """Build a step: a forward pass in inference mode, or a forward and backward pass.

    Args:
        model: Set to training or evaluation here, outside of the step.
        images: (B, 3, H, W), on the model's device.
        kind: "forward" or "training".
        dtype: The model's type; in training, autocast's.
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


def interleave(
    steps: Sequence[Step], rounds: int, device: str, clock: str = "wall"
) -> list[list[float]]:
    """Return the seconds of every step in every round; each round has its own order.

    Args:
        steps: The steps to time.
        rounds: How often.
        device: "cpu" or "cuda".
        clock: A key of ``CLOCKS``, on a CPU.
    """
    on_cpu = functools.partial(_cpu_seconds, clock=CLOCKS[clock])
    timed = _cuda_seconds if device == "cuda" else on_cpu
    for step in steps:
        for _ in range(WARM_UPS[device]):
            step()
    seconds: list[list[float]] = [[] for _ in steps]
    for turn in range(rounds):
        for index in random.Random(turn).sample(range(len(steps)), len(steps)):
            seconds[index].append(timed(steps[index]))
    return seconds


def summarise_ratios(seconds: Sequence[float], baseline: Sequence[float]) -> dict[str, float]:
    """Return the median and the 10 % and 90 % quantiles of time over the baseline's, per round."""
    ratios = [second / base for second, base in zip(seconds, baseline, strict=True)]
    tenths = statistics.quantiles(ratios, n=10, method="inclusive")
    return {
        "ratio": statistics.median(ratios),
        "ratio_p10": tenths[0],
        "ratio_p90": tenths[-1],
    }


def _cpu_seconds(step: Step, clock: Clock) -> float:
    """Time one step."""
    start = clock()
    step()
    return clock() - start


def _cuda_seconds(step: Step) -> float:
    """Time one step on the GPU between two events."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def print_status(text: str) -> None:
    """Print a status line to standard error; results go to standard output."""
    print(f"benchmark.py: {text}", file=sys.stderr)
