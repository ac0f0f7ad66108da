"""The catalogue of all mixers: one table to choose and compare them, counted and measured."""

from __future__ import annotations

import json
import math
import re
from functools import cache
from typing import Any

import torch
from markup import prose, table
from measurement_pages import FOLDER

from backbones import create_mixer, list_mixers, mixer_options
from backbones.analysis.counting import count_macs, count_parameters
from backbones.base import Mixer
from backbones.options import built_class
from backbones.registry import MixerEntry, find_mixer, hosts, why_unfit

DIM, SMALL, LARGE = 64, (14, 14), (56, 56)  # N = 196 and N = 3,136
# Counts of the order in N and C are taken between these, where lower orders weigh little.
LONG, LONGER = (112, 112), (224, 224)
WIDE, WIDER = 512, 1024
MEASURED = "token_mixers.json"  # of a folder of measurements
HEAD = [
    "mixer", "paper", "year", "kind", "options", "MACs grow as", "parameters", "MACs, N = 196",
    "MACs, N = 3,136", "time grows as", "µs per token", "bound to the grid", "hosts",
]  # fmt: skip
KINDS = {  # of packages whose names do not say it
    "afbo": "bilinear", "sbm": "bilinear", "iffn": "feed-forward", "feed_forward": "feed-forward",
    "metamixer": "convolution", "convolutions": "convolution", "attentions": "attention",
    "controls": "control", "posmlp": "token MLP", "token_mlps": "token MLP",
    "linear_attention": "linear attention", "attention": "attention", "pooling": "control",
    "convnext": "feed-forward with convolution", "convglu": "feed-forward with convolution",
    "conv_ffn": "feed-forward with convolution",
}  # fmt: skip
TEXT = """# Catalogue of mixers

All mixers with their default options, alone, for C = 64 channels. N is the number of tokens. A
click on a column's head sorts, so that the cheapest mixers come first, and words filter. The
parameters are those of a map of 14 x 14, where they depend on it. "MACs grow as" is the order in N
and C between large maps and widths: an exponent that is no whole number means that two orders are
close to each other, or that the width follows the map. "time grows as" is measured by
`python docs/_ext/measure.py tokens` for token mixers of linear cost: from 196 to 12,544 tokens,
where fixed costs let it be below N, and from 3,136 to 12,544. "µs per token" has the times on one
core at 14 x 14, 56 x 56 and 112 x 112 (N = 196, 3,136 and 12,544). A mixer bound to the grid
interpolates or computes tables anew at other map sizes. "hosts" excludes those whose modality or
width the mixer does not fit; hosts of text also refuse, when they are built, mixers that read
padding or later tokens.
"""


def pages() -> dict[str, str]:
    """Return the page."""
    parts = [TEXT]
    exponents, times = measured_exponents(), measured_times()
    for kind in ("token", "channel"):
        rows = [row_of(find_mixer(name), exponents, times) for name in list_mixers(kind)]
        parts.append(f"## {kind.title()} mixers\n\n{table(HEAD, rows)}")
    return {"mixers/catalogue": "\n\n".join(parts) + "\n"}


def row_of(entry: MixerEntry, exponents: dict[str, str], times: dict[str, str]) -> list[str]:
    """Return a mixer's row of the table, with the powers of N and times that were measured."""
    year = re.search(r"\b(?:19|20)\d\d\b", entry.source)
    options = ", ".join(f"`{name}`" for name in mixer_options(entry.name)) or "none"
    able = [host for host in hosts().values() if entry.kind in host.slots]
    unfit = [host.name for host in able if why_unfit(host, entry)]
    return [
        f"[{entry.name}]({entry.name}.md)",
        prose(entry.source),
        year[0] if year else "",
        _kind(entry),
        options,
        formula(order(entry.name)),
        f"{parameters(entry.name, DIM, SMALL):,}",
        f"{macs(entry.name, DIM, SMALL) / 1e6:.2f} M",
        f"{macs(entry.name, DIM, LARGE) / 1e6:.2f} M",
        ", ".join(map(formula, filter(None, exponents.get(entry.name, "").split(", ")))),
        times.get(entry.name, ""),
        "yes" if is_bound(entry) else "no",
        f"all {len(able)}" if not unfit else f"all {len(able)} but {', '.join(unfit)}",
    ]


def formula(text: str) -> str:
    """Return powers such as ``N C^1.9`` as a formula of Markdown."""
    if text == "none":
        return text
    return "$" + re.sub(r"\^(-?[0-9.]+)", r"^{\1}", text) + "$"


def _kind(entry: MixerEntry) -> str:
    """Return the kind of a mixer by its package: ``backbones.mixers.<package>``."""
    package = entry.build.__module__.split(".")[2]
    usual = "feed-forward" if entry.kind == "channel" else package
    return KINDS.get(package, usual)


def measured_exponents() -> dict[str, str]:
    """Return the measured powers of N, on all maps and in the last step, by mixer."""
    newest = _newest()
    place = newest["columns"].index("exponent")
    return {row[0].strip("`"): f"N^{row[place]}, N^{row[place + 1]}" for row in newest["rows"]}


def measured_times() -> dict[str, str]:
    """Return the measured times per token on the three maps, by mixer."""
    newest = _newest()
    end = newest["columns"].index("exponent")
    return {
        row[0].strip("`"): ", ".join(f"{float(cell):.3g}" for cell in row[1:end])
        for row in newest["rows"]
    }


@cache
def _newest() -> dict[str, Any]:
    """Return the newest measurement of token mixers."""
    files = sorted(FOLDER.glob(f"*/{MEASURED}"))
    contents = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return max(contents, key=lambda content: str(content["date"]))


def order(name: str) -> str:
    """Return how the multiply-adds grow with N and C, such as ``N C^2``."""
    counts = [macs(name, WIDE, LONG), macs(name, WIDE, LONGER), macs(name, WIDER, LONG)]
    if not all(counts):
        return "none"
    factor = math.prod(LONGER) / math.prod(LONG)
    powers = {
        "N": math.log(counts[1] / counts[0]) / math.log(factor),
        "C": math.log(counts[2] / counts[0]) / math.log(WIDER / WIDE),
    }
    return " ".join(filter(None, (_power(*item) for item in powers.items())))


def _power(letter: str, exponent: float) -> str:
    whole = round(exponent)
    if abs(exponent - whole) > 0.1:
        return f"{letter}^{exponent:.1f}"
    return "" if whole == 0 else letter if whole == 1 else f"{letter}^{whole}"


def is_bound(entry: MixerEntry) -> bool:
    """Return True if a parameter or table of the mixer belongs to one map size."""
    declared = built_class(entry.build, Mixer).grid_axes
    return bool(declared) or len({parameters(entry.name, DIM, g) for g in (SMALL, (7, 28))}) > 1


@cache
def parameters(name: str, dim: int, grid: tuple[int, int]) -> int:
    """Return the parameters of a mixer."""
    return count_parameters(_build(name, dim, grid))


@cache
def macs(name: str, dim: int, grid: tuple[int, int]) -> int:
    """Return the multiply-adds of a mixer on one map, by rule "macs"."""
    return count_macs(_build(name, dim, grid), shape=(*grid, dim))


def _build(name: str, dim: int, grid: tuple[int, int]) -> Any:
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        return create_mixer(name, dim, grid=grid).eval()
