"""Times backbones against a baseline in one interleaved run and prints ratios beside the papers'.

usage: python tools/benchmark.py mixers [key=value ...]       mixers against the FFN of their host
       python tools/benchmark.py backbones [key=value ...]    any networks against one of them

  host=NAME,NAME            mixers: plain hosts (default: {hosts})
  mixer=NAME,PATTERN        mixers: channel mixers (default: all that fit)
  backbone=NAME,NAME        backbones: names with their options, 'deit_t_afbo mixer.g2=6,deit_s'
  baseline=NAME             backbones: what the others are divided by (default: the first of them)
  batch=1,8                 images per step
  image_size=224            side, or HEIGHTxWIDTH
  rounds=30                 a round times every network once, in an order of its own
  train=false               true: also a training step, that is forward and backward
  compile=false             true: after torch.compile
  device=cpu                cpu or cuda
  dtype=float32             or bfloat16: of the network itself, in training by autocast
  threads=N                 of the CPU (default: torch's choice)
  keep_memory=true          false: let glibc return freed memory to the system (see below)
  format=table              table, json or csv

Timed is the classification network with 1000 classes. A ratio is a network's time over the
baseline's in the same round: its median, and where a tenth and nine tenths of the rounds lie. The
baseline stands among the others as a second network of its own; its ratio shows the noise.
Seconds of different runs do not compare, least of all on a shared machine; ratios do.

By default glibc gives large blocks back to the system and fetches them anew in every layer; the
page faults then outweigh what is measured. keep_memory=true turns that off for this process.
"""

from __future__ import annotations

import fnmatch
import functools
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

# Run as a script, Python sees the folder tools/ only; the packages lie one level up.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.complexity import NUM_CLASSES, WRITERS, Record, image_size, parse
from tools.published import dotted, list_papers, load_rows

SWITCH = ("false", "true")
SHARED = {
    "batch": "1,8", "image_size": "224", "rounds": "30", "train": "false", "compile": "false",
    "device": "cpu", "dtype": "float32", "threads": "", "keep_memory": "true", "format": "table",
}  # fmt: skip
DEFAULTS = {
    "mixers": {"host": "deit_t,swin_t,poolformer_s12", "mixer": "*", **SHARED},
    "backbones": {"backbone": "", "baseline": "", **SHARED},
}
CHOICES = {
    "device": ("cpu", "cuda"), "dtype": ("float32", "bfloat16"), "format": tuple(WRITERS),
    "train": SWITCH, "compile": SWITCH, "keep_memory": SWITCH,
}  # fmt: skip
Network = tuple[str, dict[str, Any]]  # name and options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, or 2 for arguments that cannot be served."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or {"-h", "--help", "help"} & set(arguments):
        print((__doc__ or "").replace("{hosts}", DEFAULTS["mixers"]["host"]).strip())
        return 0 if arguments else 2
    try:
        if arguments[0] not in DEFAULTS:
            raise ValueError(f"say first what to time: {' or '.join(DEFAULTS)}; see --help")
        options = parse(arguments[1:], DEFAULTS[arguments[0]], CHOICES)
        runs = mixer_runs(options) if arguments[0] == "mixers" else [backbone_run(options)]
        records = benchmark(runs, options)
    except ValueError as error:
        print(f"benchmark.py: {error}", file=sys.stderr)
        return 2
    WRITERS[options["format"]](records)
    return 0


def mixer_runs(options: dict[str, str]) -> list[list[Network]]:
    """Per host its plain network, which is the baseline, and the host with each mixer."""
    from backbones import backbone_schema, list_backbones, list_hosts, list_mixers

    hosts = _names(options["host"], list_hosts(), "host")
    mixers = _names(options["mixer"], list_mixers("channel"), "channel mixer")
    asked = set(options["mixer"].split(","))
    runs = []
    for host in hosts:
        pairs = {mixer: f"{host}_{mixer}" for mixer in mixers if mixer != "ffn"}
        for mixer in asked & set(pairs):
            backbone_schema(pairs[mixer])  # refuses a pair that does not exist, with the reason
        fitting = [name for name in pairs.values() if name in list_backbones()]
        runs.append([(name, {}) for name in (host, host, *fitting)])
    return runs


def backbone_run(options: dict[str, str]) -> list[Network]:
    """The baseline, then all networks."""
    if not options["backbone"]:
        raise ValueError("say which: backbone=NAME,NAME")
    networks = [network_of(item) for item in options["backbone"].split(",")]
    baseline = network_of(options["baseline"]) if options["baseline"] else networks[0]
    return [baseline, *networks]


def benchmark(runs: Sequence[Sequence[Network]], options: dict[str, str]) -> list[Record]:
    """Time every run, whose first network is the baseline of the others; a record per network."""
    import torch

    from tools.timing import interleave, keep_freed_memory, make_step

    batches = [_number("batch", item) for item in options["batch"].split(",")]
    rounds = _number("rounds", options["rounds"], least=2)
    if options["device"] == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda needs a GPU that torch can use, and there is none here")
    if options["threads"]:
        torch.set_num_threads(_number("threads", options["threads"]))
    kept = options["keep_memory"] == "true" and keep_freed_memory()
    device = torch.cuda.get_device_name() if options["device"] == "cuda" else "cpu"
    _tell(
        f"{device}, threads {torch.get_num_threads()}, {options['dtype']}, torch "
        f"{torch.__version__}, freed memory {'kept' if kept else 'returned to the system'}"
    )
    dtype, size = getattr(torch, options["dtype"]), image_size(options["image_size"])
    records = []
    for networks in runs:
        models = [build(network, options) for network in networks]
        for batch in batches:
            for kind in ("forward", "training")[: 1 + (options["train"] == "true")]:
                _tell(f"{label(networks[0])}: {kind}, batch {batch}, {rounds} rounds")
                images = torch.randn(batch, 3, *size, device=options["device"])
                steps = [make_step(model, images, kind, dtype) for model in models]
                seconds = interleave(steps, rounds, options["device"])
                for index in range(1, len(networks)):
                    records.append(record(networks, index, seconds, kind, batch))
    return records


def build(network: Network, options: dict[str, str]) -> Any:
    """The classification network, on its device."""
    import torch

    from backbones import create_backbone
    from heads.linear import LinearClassifier

    name, own = network
    model = LinearClassifier(create_backbone(name, **own), NUM_CLASSES).to(options["device"])
    if options["compile"] == "false":
        return model
    # All networks share one code object, of which torch would leave all but 8 versions uncompiled.
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 4096
    return torch.compile(model, fullgraph=True, dynamic=False)


def record(
    networks: Sequence[Network],
    index: int,
    seconds: Sequence[Sequence[float]],
    kind: str,
    batch: int,
) -> Record:
    """What is shown of one network; papers time forward passes only."""
    paper = paper_ratio(networks[index], networks[0]) if kind == "forward" else None
    ratios = [one / base for one, base in zip(seconds[index], seconds[0], strict=True)]
    tenths = statistics.quantiles(ratios, n=10, method="inclusive")
    return {
        "backbone": label(networks[index]),
        "step": kind,
        "batch": batch,
        "ms": statistics.median(seconds[index]) * 1e3,
        "ratio": statistics.median(ratios),
        "ratio_p10": tenths[0],
        "ratio_p90": tenths[-1],
        "paper_ratio": paper,
    }


def paper_ratio(network: Network, baseline: Network) -> float | None:
    """The quotient of two latencies that one paper reports, on its own hardware."""
    one, other = (label((name, unusual(name, own))) for name, own in (network, baseline))
    for paper in list_papers():
        reported = latencies(paper)
        if one != other and {one, other} <= reported.keys():
            return reported[one] / reported[other]
    return None


@functools.cache
def latencies(paper: str) -> dict[str, float]:
    """Milliseconds by network, from the first table that has them."""
    found: dict[str, float] = {}
    for row in load_rows(paper, "classification"):
        if "latency_ms" in row.reported:
            name = label((row.backbone, unusual(row.backbone, row.options)))
            found.setdefault(name, row.reported["latency_ms"])
    return found


def label(network: Network) -> str:
    """Name and options as they are typed."""
    return " ".join([network[0], *dotted(network[1])])


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


def network_of(text: str) -> Network:
    """``deit_t_afbo mixer.g2=6`` as a name and options."""
    from backbones import backbone_schema
    from backbones.options import unknown

    name, *settings = text.split() or [""]
    known = backbone_schema(name)  # refuses an unknown name with the nearest ones
    options: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        group, _, option = key.rpartition(".")
        if not equals or (group or option) not in known:
            raise ValueError(unknown(f"option of {name}", setting, list(known)))
        place = options.setdefault(group, {}) if group else options
        place[option] = yaml.safe_load(value)
    return name, options


def unusual(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that differ from the backbone's defaults."""
    from backbones import backbone_schema

    defaults = backbone_schema(name)
    mixer = {k: v for k, v in options.get("mixer", {}).items() if v != defaults["mixer"].get(k)}
    others = {k: v for k, v in options.items() if k != "mixer" and v != defaults.get(k)}
    return others | ({"mixer": mixer} if mixer else {})


def _number(key: str, text: str, least: int = 1) -> int:
    if not text.isdecimal() or int(text) < least:
        raise ValueError(f"{key} must be a whole number from {least} up; got {text!r}")
    return int(text)


def _tell(text: str) -> None:
    print(f"benchmark.py: {text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
