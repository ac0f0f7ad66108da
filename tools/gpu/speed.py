"""Speed and memory of mixers: over their hosts' own FFN, and over attention and the roofline."""

from __future__ import annotations

from collections.abc import Iterator

from backbones import list_mixers
from tools.bench.token_mixers import time_token_mixers
from tools.bench.whole_networks import time_runs
from tools.cli.typed_network import Network
from tools.gpu.extent import MEASURED, Record, Setting, judge

MIXERS = ("afbo", "iffn")
# Token mixers are dealt to processes: those timed eagerly follow each other, compilers do not.
PROCESSES = {"eager": 1, "compiled": 12}
USUAL = {
    "train": "true", "cuda_graphs": "false", "dtype": "bfloat16", "threads": "", "clock": "wall",
    "keep_memory": "true", "baseline": "",
}  # fmt: skip


def host_groups(setting: Setting) -> list[list[str]]:
    """Return all hosts for one process, and one process per host that is compiled."""
    return [
        [f"eager {host}" for host in setting.extent.hosts],
        *([f"compiled {host}"] for host in setting.extent.compiled_hosts),
    ]


def check_host(name: str, setting: Setting) -> Iterator[Record]:
    """Yield the ratios of each mixer's network to the plain host, as ``eager swin_t`` asks."""
    form, host = name.split()
    extent, goals = setting.extent, setting.extent.goals
    options = _options(form, setting, extent.hosts[host], extent.host_rounds)
    options["image_size"] = str(extent.image_size)
    networks: list[Network] = [
        (network, {}) for network in (host, *(f"{host}_{mixer}" for mixer in MIXERS))
    ]
    rows = time_runs([networks], options)
    for mixer in MIXERS:
        forward, training = (
            next(row for row in rows if (row["backbone"], row["step"]) == (f"{host}_{mixer}", step))
            for step in ("forward", "training")
        )
        limits = {"forward": goals.forward, "training": goals.training, "memory": goals.memory}
        figures = dict(zip(limits, (
            forward["ratio"], training["ratio"], training["memory_ratio"]
        ), strict=True))  # fmt: skip
        yield {
            "mixer": mixer, "batch": extent.hosts[host], "forward_ms": forward["ms"],
            "training_ms": training["ms"], "peak_mb": training["peak_mb"], **judge(figures, limits),
        }  # fmt: skip


def token_groups(setting: Setting) -> list[list[str]]:
    """Return token mixers for several processes, and those that are compiled."""
    extent = setting.extent
    names = [name for name in list_mixers("token") if extent.only is None or name in extent.only]
    selection = names if extent.compiled_mixers is None else extent.compiled_mixers
    forms = {"eager": names, "compiled": [name for name in names if name in selection]}
    groups = [
        [f"{form} {name}" for name in forms[form][start::processes]]
        for form, processes in PROCESSES.items()
        for start in range(processes)
    ]
    return [group for group in groups if group]


def check_tokens(name: str, setting: Setting) -> Iterator[Record]:
    """Yield a token mixer's times on each map, over attention's and over the roofline."""
    form, mixer = name.split()
    extent = setting.extent
    # What is compiled has a goal on the largest map, and one map takes a third of the compiler.
    sides = extent.sides[-1:] if form == "compiled" else extent.sides
    options = _options(form, setting, extent.batch, extent.rounds)
    options |= {"mixer": f"attention,{mixer}", "dim": str(extent.dim)}
    options["grid"] = ",".join(map(str, sides))
    rows = [row for row in time_token_mixers(options) if row["mixer"] == mixer]
    for forward, training in zip(rows[: len(sides)], rows[-len(sides) :], strict=True):
        figures = {"attention": training["ratio"]}
        verdict = judge(figures, {"attention": extent.goals.attention})
        if form == "eager":
            verdict |= {"verdict": MEASURED, "note": ""}
        yield {
            "map": training["grid"], "forward_ms": forward["ms"], "over": forward["ratio"],
            "training_ms": training["ms"], **verdict,
            **{key: training[key] for key in ("roofline_ms", "over_roofline", "peak_mb")},
        }  # fmt: skip


def _options(form: str, setting: Setting, batch: int, rounds: int) -> dict[str, str]:
    """Return the options of a benchmark, as tools/benchmark.py reads them."""
    return {
        **USUAL, "compile": "true" if form == "compiled" else "false", "device": setting.device,
        "batch": str(batch), "rounds": str(rounds),
    }  # fmt: skip
