"""Time backbones against a baseline in one interleaved run; print ratios next to the papers'.

usage: python tools/benchmark.py mixers [key=value ...]       mixers against the FFN of their host
       python tools/benchmark.py backbones [key=value ...]    any networks against one of them
       python tools/benchmark.py runtimes [key=value ...]     torch, ONNX Runtime and OpenVINO
       python tools/benchmark.py tokens [key=value ...]       single token mixers over map sizes
       python tools/benchmark.py scans [key=value ...]        recurrent mixers against loops
       python tools/benchmark.py loop [key=value ...]         steps of run.py against a plain loop
       python tools/benchmark.py data [key=value ...]         image pipelines against timm's or mm's

  host=NAME,NAME            mixers: plain hosts (default: {hosts})
  mixer=NAME,PATTERN        mixers: channel mixers (default: all that fit)
                            tokens: token mixers or patterns, '*' for all (default: {tokens})
                            scans: recurrent mixers (default: {scans})
  backbone=NAME,PATTERN     backbones: names or patterns
  backbone.KEY=VALUE        an option of all networks, as in run.py: backbone.mixer.g2=6,
                            backbone.token_mixer=sbm. Several values, backbone.mixer.g2=4,6, make
                            one network each. tokens: of all mixers, backbone.token_mixer.rank=32
                            An option of a single network follows its name, in quotes:
                            backbone='deit_t_afbo backbone.mixer.g2=6,deit_s'
  baseline=NAME             backbones, tokens: the network that the others are divided by, with its
                            options (default: the first one; tokens: attention if listed)
  compare=NAME              backbones: two forms of the same network, of these or of backbone=
                            ffnet   the training form, and fused (default: ffnet_1,ffnet_2)
                            posmlp  token matrices computed per pass, and cached (posmlp_t)
                            sbm     softmax attention, and SBM (sbm_t)
  runtime=NAME,NAME         runtimes: {runtimes}
                            (default: all that are installed), each divided by torch
  int8=true                 runtimes: the INT8 forms of ONNX Runtime and OpenVINO as well
  task=classification       backbones, runtimes: also {tasks}, with the whole network and
                            inputs that tools/complexity.py counts
                            runtimes: {dense} too, from bytes to answers
                            loop: any task; options of run.py such as data.batch_size=64
                            head=retinanet logger=csv may follow (default: backbone=deit_t)
                            data: {pipelines}
  root=FOLDER               data: class folders, COCO's or ADE20K's (default: sample data)
  dim=64                    tokens, scans: channels
  tokens=3136               scans: tokens of one image
  grid=14,28,56,112         tokens: map sizes, each a side or HEIGHTxWIDTH
  batch=1,8                 images per step (tokens: 1; runtimes: 1,16)
  image_size=224,448        image sizes, each a side or HEIGHTxWIDTH (default: 224); inputs of
                            another shape are those that the task counts
  out=growth.png            backbones: plot the growth of time over several image sizes
  rounds=30                 each round times every network once in random order (loop: 100,
                            data: 300, since augmentation varies)
  train=false               true: also a training step (forward and backward)
  compile=false             true: after torch.compile
  cuda_graphs=false         true: record each step as a CUDA graph, with device=cuda
  device=cpu                cpu or cuda
  dtype=float32             or bfloat16: of the network; in training, of autocast
  threads=N                 of the CPU (default: torch's choice; runtimes: 1)
  clock=wall                process: processor time; use it with threads=1 on a busy machine
  keep_memory=true          false: let glibc return freed memory to the system (see below)
  format=table              table, json or csv

A classification network with 1000 classes is timed, or a mixer alone. A ratio is a network's time
over the baseline's in the same round; the table shows its median and its 10 % and 90 % quantiles.
The baseline is listed as a second network as well; its ratio shows the noise.
MB is the peak memory of one step without the weights: activations, gradients and working memory.
MB ratio is MB over the baseline's.
runtimes: forward passes of the same input in the form for inference, in turn. The defaults are
those of FFNet, Table 8: one thread, batches of 1 and 16. INT8 is quantised by random inputs, since
ranges leave the time as it is; tools/export.py int8=true measures what it costs in accuracy.
loop: the baseline is plain PyTorch with the same network, optimiser and data, interleaved with the
run's steps; added ms is what run.py adds to a step.
data: the baseline reads the same files with the same augmentation through timm or the toolkit.
scans: the ratio is that of a Python loop over tokens to the scan in chunks.
tokens: us/token is the time per token; growth is us/token over that on the first grid, per round,
so 1 on every grid means a cost linear in the number of tokens. exponent is e where time has grown
as N^e since the first grid. MMACs are multiply-adds of the step in millions, three forward passes
of them in training. MB moved is input, output and parameters, in training with their gradients and
read twice; maps in between are left out. roofline ms is the time of whichever takes longer by the
peaks that a large product and a copy reached in this process. With several image sizes, growth of
a whole network is the time per pixel over that at the first size.
Compare ratios only: seconds of different runs are not comparable, least of all on a shared machine.

By default glibc returns large blocks to the system and requests them again in every layer; the page
faults then dominate the measurement. keep_memory=true turns this off for this process.
"""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Sequence
from pathlib import Path

# As a script, Python only finds modules in tools/; the packages are one level up.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tasks.engine.family import families, find_family
from tools.bench.timed_networks import COMPARISONS, select_comparison_runs
from tools.bench.whole_networks import time_runs
from tools.cli.arguments import parse_options
from tools.cli.catalogue import catalogue
from tools.cli.command import exit_with, run_command
from tools.cli.grammar import expand
from tools.cli.tables import FORMATS, Record, write
from tools.cli.typed_network import (
    Network,
    known_options,
    read_network,
    read_networks,
    read_options,
    split_backbone_options,
)
from tools.cli.usual_family import usual_task
from tools.comparing.hosts import describe_differences

SWITCH = ("false", "true")
SHARED = {
    "batch": "1,8", "rounds": "30", "train": "false", "compile": "false", "device": "cpu",
    "cuda_graphs": "false", "dtype": "float32", "threads": "", "clock": "wall",
    "keep_memory": "true", "format": "table",
}  # fmt: skip
IMAGES = {"image_size": "", **SHARED}
DEFAULTS = {
    "mixers": {"host": "deit_t,swin_t,poolformer_s12", "mixer": "*", **IMAGES},
    "backbones": {
        "backbone": "", "baseline": "", "compare": "", "out": "", "task": "", **IMAGES,
    },
    "tokens": {
        "mixer": "sbm,attention", "baseline": "", "dim": "64", "grid": "14,28,56,112",
        **SHARED, "batch": "1",
    },
    "runtimes": {
        "backbone": "", "task": "", "runtime": "", "int8": "true", "image_size": "",
        "batch": "1,16", "rounds": "30", "threads": "1", "clock": "wall", "keep_memory": "true",
        "device": "cpu", "dtype": "float32", "format": "table",
    },
    "scans": {
        "mixer": "ss2d,bi_wkv,gated_delta,mlstm", "dim": "64", "tokens": "3136", "rounds": "10",
        "train": "false", "device": "cpu", "dtype": "float32", "threads": "", "clock": "wall",
        "keep_memory": "true", "format": "table",
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
    "int8": SWITCH,
}  # fmt: skip

# Families whose whole networks take one tensor.
WHOLE = tuple(
    name
    for name, family in families().items()
    if family.counted is not None and not family.counted.parts
)
# Detectors and segmentors are timed from images to answers.
GRAPHS = tuple(
    name
    for name, family in families().items()
    if family.counted is not None and (family.whole_graph or not family.counted.parts)
)
PIPELINES = tuple(name for name, family in families().items() if family.pipeline)

COLUMNS = {
    "task": ("task", "{}"),
    "backbone": ("backbone", "{}"),
    "loop": ("loop", "{}"),
    "mixer": ("mixer", "{}"),
    "pipeline": ("pipeline", "{}"),
    "runtime": ("runtime", "{}"),
    "step": ("step", "{}"),
    "images_per_second": ("images/s", "{:.1f}"),
    "image_size": ("image", "{}"),
    "grid": ("grid", "{}"),
    "tokens": ("tokens", "{}"),
    "batch": ("batch", "{}"),
    "ms": ("ms", "{:.1f}"),
    "loop_ms": ("loop ms", "{:.1f}"),
    "added_ms": ("added ms", "{:.2f}"),
    "ratio": ("ratio", "{:.3f}"),
    "ratio_p10": ("10 %", "{:.3f}"),
    "ratio_p90": ("90 %", "{:.3f}"),
    "paper_ratio": ("paper", "{:.3f}"),
    "peak_mb": ("MB", "{:.1f}"),
    "memory_ratio": ("MB ratio", "{:.3f}"),
    "us_per_token": ("us/token", "{:.3f}"),
    "growth": ("growth", "{:.2f}"),
    "exponent": ("exponent", "{:.2f}"),
    "macs_m": ("MMACs", "{:.1f}"),
    "moved_mb": ("MB moved", "{:.2f}"),
    "roofline_ms": ("roofline ms", "{:.4f}"),
    "over_roofline": ("ms/roofline", "{:.1f}"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, or 2 after an error."""
    text = (__doc__ or "").replace("{pipelines}", ", ".join(PIPELINES))
    text = text.replace("{tasks}", ", ".join(name for name in WHOLE if name != usual_task()))
    text = text.replace("{dense}", ", ".join(name for name in GRAPHS if name not in WHOLE))
    text = text.replace("{runtimes}", "torch, compiled, onnxruntime, openvino")
    text = text.replace("{hosts}", DEFAULTS["mixers"]["host"])
    for kind in ("tokens", "scans"):
        text = text.replace(f"{{{kind}}}", DEFAULTS[kind]["mixer"])
    return run_command("benchmark.py", text, run_benchmark, arguments, needs_arguments=True)


def run_benchmark(command: Sequence[str]) -> None:
    """Time what the arguments ask for and print the table."""
    kind, *arguments = command
    if kind not in DEFAULTS:
        raise ValueError(f"the first argument must be one of {', '.join(DEFAULTS)}; see --help")
    words, option_words = split_backbone_options(arguments)
    if kind == "loop":
        option_words = [word for word in arguments if word.partition("=")[0] in DEFAULTS[kind]]
        words = [word for word in arguments if word not in option_words]
    tasks = {"data": {"task": PIPELINES}, "backbones": {"task": WHOLE}}
    tasks["runtimes"] = {"task": GRAPHS, "device": ("cpu",), "dtype": ("float32",)}
    choices = {**CHOICES, **tasks.get(kind, {})}
    options = parse_options(option_words, DEFAULTS[kind], choices, takes_backbone=kind != "data")
    if kind == "data":
        from tools.bench.pipelines import time_pipelines

        records = time_pipelines(options)
    elif kind == "loop":
        from tools.bench.loop import time_loop

        records = time_loop(options, words)
    elif kind == "runtimes":
        records = time_in_runtimes(options, words)
    elif kind == "scans":
        from tools.bench.scans import time_scans

        records = time_scans(options)
    elif kind == "tokens":
        from tools.bench.token_mixers import time_token_mixers

        records = time_token_mixers(options, words)
    else:
        runs = (select_mixer_runs if kind == "mixers" else select_backbone_runs)(options, words)
        records = time_runs(runs, options)
    write(records, options["format"], COLUMNS)
    if kind == "mixers" or (kind == "backbones" and not options["compare"]):
        for line in describe_differences([network for run in runs for network in run]):
            print(f"benchmark.py: {line}", file=sys.stderr)


def time_in_runtimes(options: dict[str, str], words: Sequence[str] = ()) -> list[Record]:
    """Time the typed networks in the typed runtimes."""
    if not options["backbone"]:
        raise ValueError("backbone= is missing: pass backbone=NAME,NAME")
    from tools.exports.timed_runtimes import installed_runtimes, time_runtimes

    family = find_family(options["task"]) if options["task"] else None
    networks = read_networks(options["backbone"], words, family)
    return time_runtimes(networks, installed_runtimes(options["runtime"]), options)


def select_mixer_runs(options: dict[str, str], words: Sequence[str] = ()) -> list[list[Network]]:
    """Return the networks per host: the plain host, which is the baseline, and each mixer in it."""
    from backbones import backbone_schema, list_backbones, list_mixers

    hosts = _match_names(options["host"], catalogue().hosts, "host")
    mixers = _match_names(options["mixer"], list_mixers("channel"), "channel mixer")
    requests = set(options["mixer"].split(","))
    runs: list[list[Network]] = []
    for host in hosts:
        pairs = {mixer: f"{host}_{mixer}" for mixer in mixers if mixer != "ffn"}
        for mixer in requests & set(pairs):
            backbone_schema(pairs[mixer])  # raises for a pair that does not fit, with the reason
        fitting_names = [name for name in pairs.values() if name in list_backbones()]
        for job in expand(words):
            names = (host, host, *fitting_names)
            runs.append([(name, read_options(job, name, known_options(name))) for name in names])
    return runs


def select_backbone_runs(options: dict[str, str], words: Sequence[str] = ()) -> list[list[Network]]:
    """Return the networks per run, the baseline first; a comparison has one run per backbone."""
    compare, backbones = options["compare"], options["backbone"]
    if compare and compare not in COMPARISONS:
        raise ValueError(f"compare must be one of {', '.join(COMPARISONS)}; got {compare!r}")
    if compare and options["baseline"]:
        raise ValueError("compare= has its own baseline; leave baseline= or compare= out")
    if compare:
        return select_comparison_runs(compare, backbones, words)
    if not backbones:
        raise ValueError(
            f"backbone= is missing: pass backbone=NAME,NAME or compare={'|'.join(COMPARISONS)}"
        )
    family = find_family(options["task"]) if options["task"] else None
    networks = read_networks(backbones, words, family)
    baseline_text = options["baseline"]
    baseline = read_network(baseline_text, family=family) if baseline_text else networks[0]
    again = [] if baseline in networks else [baseline]  # its ratio shows the noise
    return [[baseline, *again, *networks]]


def _match_names(text: str, valid_names: Sequence[str], kind: str) -> list[str]:
    """List the known names that comma-separated names and patterns match."""
    from backbones.options import unknown

    names: list[str] = []
    for item in text.split(","):
        matches = fnmatch.filter(valid_names, item)
        if not matches:
            raise ValueError(unknown(kind, item, valid_names))
        names += matches
    return list(dict.fromkeys(names))


if __name__ == "__main__":
    exit_with(main)
