"""Time single token mixers over maps of growing size: time, ratio to a baseline, cost per token."""

from __future__ import annotations

import fnmatch
import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any

from tools.bench.peak_memory import measure_peaks
from tools.bench.roofline import count_work, least_seconds, measure_device
from tools.bench.timed_networks import to_device
from tools.bench.timing import (
    interleave,
    make_step,
    print_status,
    record_cuda_graph,
    set_up_process,
    summarise_ratios,
)
from tools.cli.arguments import parse_grid, parse_integer
from tools.cli.tables import Record
from tools.cli.typed_network import Network, network_label, read_options, split_outside_brackets

PREFIX = "backbone.token_mixer."


def time_token_mixers(options: dict[str, str], words: Sequence[str] = ()) -> list[Record]:
    """Time every mixer on every grid, all in the same rounds; return a record for each.

    Args:
        options: The command's options.
        words: Options of all mixers, such as ``backbone.token_mixer.rank=32``.

    Raises:
        ValueError: An option is wrong.
    """
    import torch

    from backbones import create_mixer
    from backbones.fast import fast

    mixers = read_mixers(options, words)
    grids = [parse_grid(item) for item in options["grid"].split(",")]
    dim = parse_integer("dim", options["dim"])
    batches = [parse_integer("batch", item) for item in options["batch"].split(",")]
    rounds = parse_integer("rounds", options["rounds"], least=2)
    # Bad options must raise before the first minute of timing.
    for name, values in mixers:
        create_mixer(name, dim, grid=grids[0], **values)
    dtype = set_up_process(options)
    device = measure_device(options["device"], dtype, options["clock"])
    print_status(
        f"roofline: {2 * device.macs / 1e12:.2f} TFLOP/s in a large product, "
        f"{device.bytes / 1e9:.0f} GB/s in a copy"
    )
    records: list[Record] = []
    for batch in batches:
        for kind in ("forward", "training")[: 1 + (options["train"] == "true")]:
            print_status(f"token mixers of {dim} channels: {kind}, batch {batch}, {rounds} rounds")
            steps, models = [], []
            for size in grids:
                x = torch.randn(batch, *size, dim, device=options["device"])
                x.requires_grad_(kind == "training")  # as after other layers
                for name, values in mixers:
                    mixer = to_device(fast(create_mixer(name, dim, grid=size, **values)), options)
                    steps.append(make_step(mixer, x, kind, dtype))
                    models.append(mixer)
            is_recorded = options["cuda_graphs"] == "true"
            timed = [record_cuda_graph(step) for step in steps] if is_recorded else steps
            seconds = interleave(timed, rounds, options["device"], options["clock"])
            peaks = measure_peaks(steps, models, options["device"])
            table = [seconds[i : i + len(mixers)] for i in range(0, len(steps), len(mixers))]
            rows = summarise(mixers, grids, table, kind, batch)
            # Records go mixer by mixer, steps grid by grid.
            places = itertools.product(range(1, len(mixers)), range(len(grids)))
            for row, (index, number) in zip(rows, places, strict=True):
                work = count_work(mixers[index], dim, grids[number], batch, kind, dtype)
                least = least_seconds(work, device) * 1e3
                row["peak_mb"] = peaks[number * len(mixers) + index] / 1e6
                row |= {"macs_m": work.macs / 1e6, "moved_mb": work.bytes / 1e6}
                row |= {"roofline_ms": least, "over_roofline": row["ms"] / least}
            records += rows
    return records


def read_mixers(options: dict[str, str], words: Sequence[str] = ()) -> list[Network]:
    """Return the baseline, then all mixers with their options, including the baseline again.

    The baseline is the named mixer, else attention if it is among the mixers, else the first one.
    """
    mixers = [
        _read_mixer(item, words)
        for pattern in split_outside_brackets(options["mixer"], ",")
        for item in _expand(pattern)
    ]
    if options["baseline"]:
        baseline = _read_mixer(options["baseline"], ())
        return [baseline, *([] if baseline in mixers else [baseline]), *mixers]
    attention: list[Network] = [mixer for mixer in mixers if mixer == ("attention", {})]
    return [(attention or mixers)[0], *mixers]


def _expand(text: str) -> list[str]:
    """Return the token mixers that a pattern matches, with the options that follow it."""
    from backbones import list_mixers

    pattern, *words = split_outside_brackets(text, " ")
    if not set(pattern) & set("*?["):
        return [text]
    names = fnmatch.filter(list_mixers("token"), pattern)
    if not names:
        raise ValueError(f"no token mixer matches {pattern!r}; 'sbm*' or '*' are patterns")
    return [" ".join([name, *words]) for name in names]


def _exponent(
    seconds: Sequence[float], first: Sequence[float], tokens: int, grid: tuple[int, int]
) -> float | None:
    """Return e where time grows as N^e since the first grid; None on that grid itself."""
    factor = tokens / (grid[0] * grid[1])
    if factor == 1:
        return None
    ratio = statistics.median(now / then for now, then in zip(seconds, first, strict=True))
    return math.log(ratio) / math.log(factor)


def _read_mixer(text: str, words: Sequence[str]) -> Network:
    """Parse ``sbm backbone.token_mixer.rank=32`` to a name and options."""
    from backbones import mixer_options
    from backbones.registry import find_mixer

    name, *option_words = split_outside_brackets(text, " ")
    find_mixer(name, "token")  # raises for unknown names and channel mixers
    valid_names = [PREFIX + key for key in mixer_options(name)]
    options = read_options([*words, *filter(None, option_words)], name, valid_names)
    return name, options.get("token_mixer", {})


def summarise(
    mixers: Sequence[Network],
    grids: Sequence[tuple[int, int]],
    seconds: Sequence[Sequence[Sequence[float]]],
    kind: str,
    batch: int,
) -> list[dict[str, Any]]:
    """Summarise seconds[grid][mixer][round] in records; the first mixer is the baseline."""
    records = []
    for index in range(1, len(mixers)):
        first = [second / (grids[0][0] * grids[0][1]) for second in seconds[0][index]]
        for size, row in zip(grids, seconds, strict=True):
            tokens = size[0] * size[1]
            per_token = [second / tokens for second in row[index]]
            growth = [now / then for now, then in zip(per_token, first, strict=True)]
            records.append(
                {
                    "mixer": network_label(mixers[index], PREFIX),
                    "step": kind,
                    "grid": f"{size[0]}x{size[1]}",
                    "batch": batch,
                    "ms": statistics.median(row[index]) * 1e3,
                    **summarise_ratios(row[index], row[0]),
                    "us_per_token": statistics.median(per_token) / batch * 1e6,
                    "growth": statistics.median(growth),
                    "exponent": _exponent(row[index], seconds[0][index], tokens, grids[0]),
                }
            )
    return records
