"""Single token mixers over maps of growing size: time, ratio to one of them, cost per token."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from tools.benchmarking.networks import placed
from tools.benchmarking.timing import as_cuda_graph, interleave, make_step, prepare, spread, tell
from tools.command_line.arguments import grid, number
from tools.command_line.tables import Record
from tools.command_line.typed_network import Network, label, read_options, split_outside

PREFIX = "backbone.token_mixer."


def token_records(options: dict[str, str], words: Sequence[str] = ()) -> list[Record]:
    """Time every mixer on every grid, all in the same rounds; a record for each.

    Args:
        options: Of the command.
        words: Options of all mixers, such as ``backbone.token_mixer.rank=32``.

    Raises:
        ValueError: Names the option that is wrong.
    """
    import torch

    from backbones import create_mixer
    from backbones.fast import fast

    mixers, grids = mixer_list(options, words), [grid(item) for item in options["grid"].split(",")]
    dim = number("dim", options["dim"])
    batches = [number("batch", item) for item in options["batch"].split(",")]
    rounds = number("rounds", options["rounds"], least=2)
    # Bad options are to be refused before the first minute of timing, and all are built anew below.
    for name, own in mixers:
        create_mixer(name, dim, grid=grids[0], **own)
    dtype = prepare(options)
    records: list[Record] = []
    for batch in batches:
        for kind in ("forward", "training")[: 1 + (options["train"] == "true")]:
            tell(f"token mixers of {dim} channels: {kind}, batch {batch}, {rounds} rounds")
            steps = []
            for size in grids:
                x = torch.randn(batch, *size, dim, device=options["device"])
                x.requires_grad_(kind == "training")  # as behind other layers
                for name, own in mixers:
                    mixer = placed(fast(create_mixer(name, dim, grid=size, **own)), options)
                    steps.append(make_step(mixer, x, kind, dtype))
            if options["cuda_graphs"] == "true":
                steps = [as_cuda_graph(step) for step in steps]
            seconds = interleave(steps, rounds, options["device"], options["clock"])
            table = [seconds[i : i + len(mixers)] for i in range(0, len(steps), len(mixers))]
            records += table_records(mixers, grids, table, kind, batch)
    return records


def mixer_list(options: dict[str, str], words: Sequence[str] = ()) -> list[Network]:
    """The baseline, then all mixers with their options, the baseline once again among them.

    The baseline is named, or attention where it is among the mixers, else the first of them.
    """
    mixers = [_read_mixer(item, words) for item in split_outside(options["mixer"], ",")]
    if options["baseline"]:
        baseline = _read_mixer(options["baseline"], ())
        return [baseline, *([] if baseline in mixers else [baseline]), *mixers]
    plain: list[Network] = [mixer for mixer in mixers if mixer == ("attention", {})]
    return [(plain or mixers)[0], *mixers]


def _read_mixer(text: str, words: Sequence[str]) -> Network:
    """``sbm backbone.token_mixer.rank=32`` as a name and options."""
    from backbones import mixer_options
    from backbones.registry import find_mixer

    name, *own = split_outside(text, " ")
    find_mixer(name, "token")  # refuses a name that is none, and channel mixers
    known = [PREFIX + key for key in mixer_options(name)]
    options = read_options([*words, *filter(None, own)], name, known)
    return name, options.get("token_mixer", {})


def table_records(
    mixers: Sequence[Network],
    grids: Sequence[tuple[int, int]],
    seconds: Sequence[Sequence[Sequence[float]]],
    kind: str,
    batch: int,
) -> list[Record]:
    """What is shown of seconds[grid][mixer][round]; the first mixer is the baseline."""
    records = []
    for index in range(1, len(mixers)):
        first = [one / (grids[0][0] * grids[0][1]) for one in seconds[0][index]]
        for size, row in zip(grids, seconds, strict=True):
            tokens = size[0] * size[1]
            per_token = [one / tokens for one in row[index]]
            growth = [now / then for now, then in zip(per_token, first, strict=True)]
            records.append(
                {
                    "mixer": label(mixers[index], PREFIX),
                    "step": kind,
                    "grid": f"{size[0]}x{size[1]}",
                    "batch": batch,
                    "ms": statistics.median(row[index]) * 1e3,
                    **spread(row[index], row[0]),
                    "us_per_token": statistics.median(per_token) / batch * 1e6,
                    "growth": statistics.median(growth),
                }
            )
    return records
