"""Times steps against each other in one process, round by round."""

from __future__ import annotations

import functools
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from backbones.fast import operators_serve, status
from tools.command_line.arguments import number
from tools.running.freed_memory import keep_freed_memory

WARM_UP = 3

Step = Callable[[], None]
Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "process": time.process_time}


def prepare(options: Mapping[str, str]) -> torch.dtype:
    """Set up the process as the options say, tell what was set, and give the dtype.

    Raises:
        ValueError: There is no such device.
    """
    if options["device"] == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "device=cuda needs a GPU that torch can use, and there is none here; pass device=cpu"
        )
    if options["device"] == "cuda" and options["clock"] != "wall":
        raise ValueError("device=cuda is timed by the GPU's own events; leave out clock=")
    if options["device"] != "cuda" and options.get("cuda_graphs") == "true":
        raise ValueError("cuda_graphs=true records what a GPU does; pass device=cuda as well")
    if options["threads"]:
        torch.set_num_threads(number("threads", options["threads"]))
    kept = options["keep_memory"] == "true" and keep_freed_memory()
    device, dtype = "cpu", getattr(torch, options["dtype"])
    if options["device"] == "cuda":
        device = torch.cuda.get_device_name()
        operators_serve(torch.empty(1, device="cuda", dtype=dtype))  # a first trial, for the status
    tell(
        f"{device}, threads {torch.get_num_threads()}, {options['dtype']}, torch "
        f"{torch.__version__}, freed memory {'kept' if kept else 'returned to the system'}; "
        f"{status()}"
    )
    return dtype


def as_cuda_graph(step: Step) -> Step:
    """What a step launches on the GPU, recorded once; no time goes to Python between launches."""
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


def interleave(
    steps: Sequence[Step], rounds: int, device: str, clock: str = "wall"
) -> list[list[float]]:
    """Seconds of every step in every round; each round has its own order.

    Args:
        steps: What is timed.
        rounds: How often.
        device: "cpu" or "cuda".
        clock: A key of ``CLOCKS``, on a CPU.
    """
    on_cpu = functools.partial(_cpu_seconds, clock=CLOCKS[clock])
    timed = _cuda_seconds if device == "cuda" else on_cpu
    for step in steps:
        for _ in range(WARM_UP):
            step()
    seconds: list[list[float]] = [[] for _ in steps]
    for turn in range(rounds):
        for index in random.Random(turn).sample(range(len(steps)), len(steps)):
            seconds[index].append(timed(steps[index]))
    return seconds


def spread(seconds: Sequence[float], baseline: Sequence[float]) -> dict[str, float]:
    """Time over the baseline's in the same round: the median, a tenth and nine tenths of it."""
    ratios = [one / base for one, base in zip(seconds, baseline, strict=True)]
    tenths = statistics.quantiles(ratios, n=10, method="inclusive")
    return {
        "ratio": statistics.median(ratios),
        "ratio_p10": tenths[0],
        "ratio_p90": tenths[-1],
    }


def _cpu_seconds(step: Step, clock: Clock) -> float:
    """Time of one step."""
    start = clock()
    step()
    return clock() - start


def _cuda_seconds(step: Step) -> float:
    """Time of one step on the GPU, between two events."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def tell(text: str) -> None:
    """A line beside the results, which go to standard output."""
    print(f"benchmark.py: {text}", file=sys.stderr)
