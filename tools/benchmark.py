"""Times backbones against a baseline in one interleaved run and prints ratios beside the papers'.

usage: python tools/benchmark.py mixers [key=value ...]       mixers against the FFN of their host
       python tools/benchmark.py backbones [key=value ...]    any networks against one of them
       python tools/benchmark.py tokens [key=value ...]       single token mixers over map sizes
       python tools/benchmark.py loop [key=value ...]         a step of run.py against a bare one
       python tools/benchmark.py data [key=value ...]         image pipelines against timm's, MMs'

  host=NAME,NAME            mixers: plain hosts (default: {hosts})
  mixer=NAME,PATTERN        mixers: channel mixers (default: all that fit)
                            tokens: token mixers (default: {tokens})
  backbone=NAME,PATTERN     backbones: names or patterns
  backbone.KEY=VALUE        an option of all of them, in run.py's words: backbone.mixer.g2=6,
                            backbone.token_mixer=sbm; several values, backbone.mixer.g2=4,6, make
                            a network each. tokens: of all mixers, backbone.token_mixer.rank=32
                            An option of one alone stands behind its name, quoted:
                            backbone='deit_t_afbo backbone.mixer.g2=6,deit_s'
  baseline=NAME             backbones, tokens: what the others are divided by, with options of its
                            own (default: the first of them, of tokens attention if it is one)
  compare=NAME              backbones: two forms of the same network, of these or of backbone=
                            ffnet   the training form, and fused (default: ffnet_1,ffnet_2)
                            posmlp  its token matrices made in each pass, and kept (posmlp_t)
                            sbm     softmax attention in place of SBM, and SBM (sbm_t)
  task=classification       loop: or another. All else that run.py takes may be typed as well, such
                            as data.batch_size=64 head=retinanet logger=csv (backbone=deit_t)
                            data: {pipelines}
  root=FOLDER               data: class folders, COCO's or ADE20K's (default: sample data)
  dim=64                    tokens: channels
  grid=14,28,56,112         tokens: map sizes, each a side or HEIGHTxWIDTH
  batch=1,8                 images per step (tokens: 1)
  image_size=224,448        sides, or HEIGHTxWIDTH, of images (default: 224)
  out=growth.png            backbones: a picture of how time grows over several image sizes
  rounds=30                 a round times every network once, in an order of its own (loop: 100,
                            data: 300, since images are changed at random)
  train=false               true: also a training step, that is forward and backward
  compile=false             true: after torch.compile
  cuda_graphs=false         true: each step recorded as a CUDA graph, with device=cuda
  device=cpu                cpu or cuda
  dtype=float32             or bfloat16: of the network itself, in training by autocast
  threads=N                 of the CPU (default: torch's choice)
  clock=wall                process: processor time, with threads=1 on a machine that does other
                            things as well
  keep_memory=true          false: let glibc return freed memory to the system (see below)
  format=table              table, json or csv

Timed is the classification network with 1000 classes, or a mixer alone. A ratio is a network's time
over the baseline's in the same round: its median, and where a tenth and nine tenths of the rounds
lie. The baseline stands among the others as a second network of its own; its ratio shows the noise.
MB is the most memory that one step takes beside the network's weights, in activations, gradients
and working memory, exactly; MB ratio is that over the baseline's.
Of a loop, the baseline is PyTorch alone with the same network, optimiser and data, which takes its
steps by turns with those of the run; added ms is what the run's machinery adds to a step.
Of data, the baseline reads the same files with the same augmentation by timm or the toolkit.
Of tokens, us/token is the time per token and growth this time over that on the first grid, taken
round by round as well: 1 on every grid is a cost linear in the number of tokens. Of whole
networks on several image sizes growth is the time per pixel over that at the first size, likewise.
Seconds of different runs do not compare, least of all on a shared machine; ratios do.

By default glibc gives large blocks back to the system and fetches them anew in every layer; the
page faults then outweigh what is measured. keep_memory=true turns that off for this process.
"""

from __future__ import annotations

import fnmatch
import itertools
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

# Run as a script, Python sees the folder tools/ only; the packages lie one level up.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tasks.engine.family import families
from tools.bench import growth
from tools.bench import timed_networks as networks
from tools.bench.timed_networks import COMPARISONS, comparison_runs
from tools.cli.arguments import image_size, number, parse
from tools.cli.catalogue import catalogue
from tools.cli.command import answer, exit_with
from tools.cli.tables import FORMATS, Record, write
from tools.cli.typed_network import (
    Network,
    jobs,
    known_options,
    label,
    read_network,
    read_networks,
    read_options,
    separate,
)
from tools.cli.usual_family import usual_family, usual_task
from tools.comparing.hosts import notes_on

SWITCH = ("false", "true")
SHARED = {
    "batch": "1,8", "rounds": "30", "train": "false", "compile": "false", "device": "cpu",
    "cuda_graphs": "false", "dtype": "float32", "threads": "", "clock": "wall",
    "keep_memory": "true", "format": "table",
}  # fmt: skip
IMAGES = {"image_size": "224", **SHARED}
DEFAULTS = {
    "mixers": {"host": "deit_t,swin_t,poolformer_s12", "mixer": "*", **IMAGES},
    "backbones": {"backbone": "", "baseline": "", "compare": "", "out": "", **IMAGES},
    "tokens": {
        "mixer": "sbm,attention", "baseline": "", "dim": "64", "grid": "14,28,56,112",
        **SHARED, "batch": "1",
    },
    "data": {
        "task": usual_task(), "root": "", "batch": "8", "rounds": "300", "threads": "1",
        "clock": "wall", "keep_memory": "true", "device": "cpu", "dtype": "float32",
        "format": "table",
    },
    "loop": {
        "task": usual_task(), "backbone": "deit_t", "device": "cpu", "dtype": "float32",
        "rounds": "100", "threads": "", "clock": "wall", "keep_memory": "true",
        "format": "table",
    },
}  # fmt: skip
CHOICES = {
    "device": ("cpu", "cuda"), "dtype": ("float32", "bfloat16"), "clock": ("wall", "process"),
    "format": FORMATS,
    "train": SWITCH, "compile": SWITCH, "cuda_graphs": SWITCH, "keep_memory": SWITCH,
}  # fmt: skip

PIPELINES = tuple(name for name, family in families().items() if family.pipeline)

COLUMNS = {
    "task": ("task", "{}"),
    "backbone": ("backbone", "{}"),
    "loop": ("loop", "{}"),
    "mixer": ("mixer", "{}"),
    "pipeline": ("pipeline", "{}"),
    "step": ("step", "{}"),
    "images_per_second": ("images/s", "{:.1f}"),
    "image_size": ("image", "{}"),
    "grid": ("grid", "{}"),
    "batch": ("batch", "{}"),
    "ms": ("ms", "{:.1f}"),
    "added_ms": ("added ms", "{:.2f}"),
    "ratio": ("ratio", "{:.3f}"),
    "ratio_p10": ("10 %", "{:.3f}"),
    "ratio_p90": ("90 %", "{:.3f}"),
    "paper_ratio": ("paper", "{:.3f}"),
    "peak_mb": ("MB", "{:.1f}"),
    "memory_ratio": ("MB ratio", "{:.3f}"),
    "us_per_token": ("us/token", "{:.3f}"),
    "growth": ("growth", "{:.2f}"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, or 2 for arguments that cannot be served."""
    text = (__doc__ or "").replace("{pipelines}", ", ".join(PIPELINES))
    text = text.replace("{hosts}", DEFAULTS["mixers"]["host"])
    text = text.replace("{tokens}", DEFAULTS["tokens"]["mixer"])
    return answer("benchmark.py", text, timed, arguments, needs_arguments=True)


def timed(typed: Sequence[str]) -> None:
    """Print what the arguments ask for."""
    kind, *arguments = typed
    if kind not in DEFAULTS:
        raise ValueError(f"say first what to time: {', '.join(DEFAULTS)}; see --help")
    words, own = separate(arguments)
    if kind == "loop":
        own = [one for one in arguments if one.partition("=")[0] in DEFAULTS[kind]]
        words = [one for one in arguments if one not in own]
    choices = {**CHOICES, "task": PIPELINES} if kind == "data" else CHOICES
    options = parse(own, DEFAULTS[kind], choices, takes_backbone=kind != "data")
    if kind == "data":
        from tools.bench.pipelines import pipeline_records

        records = pipeline_records(options)
    elif kind == "loop":
        from tools.bench.loop import loop_records

        records = loop_records(options, words)
    elif kind == "tokens":
        from tools.bench.token_mixers import token_records

        records = token_records(options, words)
    else:
        runs = (mixer_runs if kind == "mixers" else backbone_runs)(options, words)
        records = benchmark(runs, options)
    write(records, options["format"], COLUMNS)
    if kind == "mixers" or (kind == "backbones" and not options["compare"]):
        for line in notes_on([network for run in runs for network in run]):
            print(f"benchmark.py: {line}", file=sys.stderr)


def mixer_runs(options: dict[str, str], words: Sequence[str] = ()) -> list[list[Network]]:
    """Per host its plain network, which is the baseline, and the host with each mixer."""
    from backbones import backbone_schema, list_backbones, list_mixers

    known = catalogue().hosts_for(usual_family().modality)
    hosts = _names(options["host"], known, "host")
    mixers = _names(options["mixer"], list_mixers("channel"), "channel mixer")
    asked = set(options["mixer"].split(","))
    runs: list[list[Network]] = []
    for host in hosts:
        pairs = {mixer: f"{host}_{mixer}" for mixer in mixers if mixer != "ffn"}
        for mixer in asked & set(pairs):
            backbone_schema(pairs[mixer])  # refuses a pair that does not exist, with the reason
        fitting = [name for name in pairs.values() if name in list_backbones()]
        for chosen in jobs(words):
            names = (host, host, *fitting)
            runs.append([(one, read_options(chosen, one, known_options(one))) for one in names])
    return runs


def backbone_runs(options: dict[str, str], words: Sequence[str] = ()) -> list[list[Network]]:
    """Of a run the baseline, then all networks; a comparison has a run for each backbone."""
    compare, backbones = options["compare"], options["backbone"]
    if compare and compare not in COMPARISONS:
        raise ValueError(f"compare must be one of {', '.join(COMPARISONS)}; got {compare!r}")
    if compare and options["baseline"]:
        raise ValueError("compare has its own baseline; leave out baseline= or compare=")
    if compare:
        return comparison_runs(compare, backbones, words)
    if not backbones:
        raise ValueError(
            f"say which: backbone=NAME,NAME, or one of compare={', '.join(COMPARISONS)}"
        )
    chosen = read_networks(backbones, words)
    baseline = read_network(options["baseline"]) if options["baseline"] else chosen[0]
    again = [] if baseline in chosen else [baseline]  # whose ratio shows the noise
    return [[baseline, *again, *chosen]]


def benchmark(runs: Sequence[Sequence[Network]], options: dict[str, str]) -> list[Record]:
    """Time every run, whose first network is the baseline of the others; a record per network."""
    import torch

    from tools.bench.peak_memory import peaks_of
    from tools.bench.timing import as_cuda_graph, interleave, make_step, prepare, tell

    batches = [number("batch", item) for item in options["batch"].split(",")]
    sizes = [image_size(item or " ") for item in options["image_size"].split(",")]
    rounds = number("rounds", options["rounds"], least=2)
    picture = options.get("out", "")
    if picture:
        growth.check_picture(picture, sizes)
    dtype = prepare(options)
    kinds = ("forward", "training")[: 1 + (options["train"] == "true")]
    records: list[Record] = []
    if options["compile"] == "true":
        tell("torch.compile takes up to minutes for each network, size and batch")
    for run in runs:
        models = [networks.build(network, options) for network in run]
        timed = {}
        peaks = {}
        for batch, kind in itertools.product(batches, kinds):
            shown = ", ".join(map(growth.name_of, sizes))
            tell(f"{label(run[0])}: {kind}, {shown}, batch {batch}, {rounds} rounds")
            images = [torch.randn(batch, 3, *size, device=options["device"]) for size in sizes]
            steps = [make_step(model, one, kind, dtype) for one in images for model in models]
            # All sizes in the same rounds, so that what else the machine does hits them alike.
            is_recorded = options["cuda_graphs"] == "true"
            timed_steps = [as_cuda_graph(step) for step in steps] if is_recorded else steps
            seconds = interleave(timed_steps, rounds, options["device"], options["clock"])
            highest = peaks_of(steps, models, options["device"])
            for place, size in enumerate(sizes):
                own = slice(place * len(models), (place + 1) * len(models))
                timed[size, batch, kind], peaks[size, batch, kind] = seconds[own], highest[own]
        for size, batch, kind in itertools.product(sizes, batches, kinds):
            seconds, highest = timed[size, batch, kind], peaks[size, batch, kind]
            for index in range(1, len(run)):
                made = record(run, index, seconds, kind, growth.name_of(size), batch)
                made["peak_mb"] = highest[index] / 1e6
                made["memory_ratio"] = highest[index] / highest[0] if highest[0] else None
                if len(sizes) > 1:
                    first = timed[sizes[0], batch, kind][index]
                    made["growth"] = growth.growth(seconds[index], size, first, sizes[0])
                records.append(made)
    if picture:
        growth.draw(records, picture)
        tell(f"picture written to {picture}")
    return records


def record(
    run: Sequence[Network],
    index: int,
    seconds: Sequence[Sequence[float]],
    kind: str,
    size: str,
    batch: int,
) -> Record:
    """What is shown of one network; papers time forward passes only."""
    from tools.bench.timing import spread

    return {
        "backbone": label(run[index]),
        "step": kind,
        "image_size": size,
        "batch": batch,
        "ms": statistics.median(seconds[index]) * 1e3,
        **spread(seconds[index], seconds[0]),
        "paper_ratio": networks.paper_ratio(run[index], run[0]) if kind == "forward" else None,
    }


def _names(text: str, known: Sequence[str], what: str) -> list[str]:
    """Names out of names and patterns with commas between them."""
    from backbones.options import unknown

    names: list[str] = []
    for item in text.split(","):
        found = fnmatch.filter(known, item)
        if not found:
            raise ValueError(unknown(what, item, known))
        names += found
    return list(dict.fromkeys(names))


if __name__ == "__main__":
    exit_with(main)
