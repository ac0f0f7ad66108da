"""Time whole networks against the first one of their run: ratios, growth and peak memory."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence

from tools.bench import growth
from tools.bench import timed_networks as networks
from tools.cli.arguments import parse_integer
from tools.cli.tables import Record
from tools.cli.typed_network import Network, network_label


def time_runs(runs: Sequence[Sequence[Network]], options: Mapping[str, str]) -> list[Record]:
    """Time every run against its first network; return one record per other network."""
    from tools.bench.peak_memory import measure_peaks
    from tools.bench.timing import (
        interleave,
        make_step,
        print_status,
        record_cuda_graph,
        set_up_process,
    )

    batches = [parse_integer("batch", item) for item in options["batch"].split(",")]
    names = [name for run in runs for name, _ in run]
    shapes = networks.input_shapes(names, options["image_size"], options.get("task", ""))
    family = networks.timed_family(names[0], options.get("task", ""))
    sizes = {shape: growth.format_size(shape, family.channels_first) for shape in shapes}
    rounds = parse_integer("rounds", options["rounds"], least=2)
    picture = options.get("out", "")
    if picture:
        growth.check_picture(picture, shapes)
    dtype = set_up_process(options)
    kinds = ("forward", "training")[: 1 + (options["train"] == "true")]
    records: list[Record] = []
    if options["compile"] == "true":
        print_status("torch.compile takes up to minutes per network, size and batch")
    for run in runs:
        models = [networks.build_network(network, options) for network in run]
        timed = {}
        peaks = {}
        for batch, kind in itertools.product(batches, kinds):
            size_text = ", ".join(sizes.values())
            print_status(
                f"{network_label(run[0])}: {kind}, {size_text}, batch {batch}, {rounds} rounds"
            )
            inputs = [networks.example_input(family, batch, shape) for shape in shapes]
            inputs = [images.to(options["device"]) for images in inputs]
            steps = [make_step(model, images, kind, dtype) for images in inputs for model in models]
            # All sizes share the rounds, so that other load on the machine affects them alike.
            is_recorded = options["cuda_graphs"] == "true"
            timed_steps = [record_cuda_graph(step) for step in steps] if is_recorded else steps
            seconds = interleave(timed_steps, rounds, options["device"], options["clock"])
            highest = measure_peaks(steps, models, options["device"])
            for place, shape in enumerate(shapes):
                span = slice(place * len(models), (place + 1) * len(models))
                timed[shape, batch, kind], peaks[shape, batch, kind] = seconds[span], highest[span]
        for shape, batch, kind in itertools.product(shapes, batches, kinds):
            seconds, highest = timed[shape, batch, kind], peaks[shape, batch, kind]
            for index in range(1, len(run)):
                record = make_record(
                    run, index, seconds, kind, sizes[shape], batch,
                    options.get("task", ""),
                )  # fmt: skip
                record["peak_mb"] = highest[index] / 1e6
                record["memory_ratio"] = highest[index] / highest[0] if highest[0] else None
                if len(shapes) > 1:
                    first = timed[shapes[0], batch, kind][index]
                    record["growth"] = growth.growth_ratio(seconds[index], shape, first, shapes[0])
                records.append(record)
    if picture:
        growth.draw_growth(records, picture)
        print_status(f"picture written to {picture}")
    return records


def make_record(
    run: Sequence[Network],
    index: int,
    seconds: Sequence[Sequence[float]],
    kind: str,
    size: str,
    batch: int,
    task: str = "",
) -> Record:
    """Return the record of one network; papers only time forward passes."""
    from tools.bench.timing import summarise_ratios

    return {
        "backbone": network_label(run[index]),
        "step": kind,
        "image_size": size,
        "batch": batch,
        "ms": statistics.median(seconds[index]) * 1e3,
        **summarise_ratios(seconds[index], seconds[0]),
        "paper_ratio": networks.find_paper_ratio(run[index], run[0], task)
        if kind == "forward"
        else None,
    }
