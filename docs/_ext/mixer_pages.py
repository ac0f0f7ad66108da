"""One page for every registered mixer, from its registration, docstrings and a trace."""

from __future__ import annotations

import fnmatch
import importlib
import inspect
import json
import re
from pathlib import Path

import paper_counts
import yaml
from dataflow import DIM, DRAWN_WITH, GRID, picture
from markup import prose, table
from paper_pages import rows_table

from backbones import list_backbones, list_mixers, mixer_options
from backbones.base import Mixer
from backbones.options import built_class
from backbones.options.meanings import meanings, summary
from backbones.registry import OWN_FFN, MixerEntry, find_host, find_mixer, hosts, why_unfit
from tools.cli.typed_network import network_label
from tools.complexity import count_model

EQUATIONS = yaml.safe_load((Path(__file__).parent / "equations.yaml").read_text(encoding="utf-8"))
COUNTED_ON = ("deit_t", "swin_t", "poolformer_s12")
# Token mixers that plain hosts have, of which papers report rows.
OWN_IN = {
    "cycle_fc": "cyclemlp_*", "ffnified": "ffnet_[1-4]", "ggqpe": "posmlp_*", "hire": "hiremlp_*",
    "pooling": "poolformer_*", "sbm": "sbm_*", "sgu": "gmlp_*",
}  # fmt: skip
INTRODUCTION = """# Mixers

A channel mixer replaces a host's feed-forward network, and a token mixer its attention or pooling.
Both map (B, H, W, C) to the same shape. [A mixer](../../tutorials/mixer.md) shows how to add one.
The [catalogue](catalogue.md) compares all of them: size, cost, growth with the map, hosts.
"""
SYMBOLS = "The [notes](#source-and-what-the-paper-leaves-open) at the end explain the symbols."
CONTENTS = """
```{toctree}
:hidden:

%s
```
"""


def pages() -> dict[str, str]:
    """Return the pages."""
    names = list_mixers()
    tables = []
    for kind in ("channel", "token"):
        found = list_mixers(kind)
        rows = [
            [
                f"[{name}]({name}.md)",
                prose(_about(find_mixer(name))),
                prose(find_mixer(name).source),
            ]
            for name in found
        ]
        head = ["mixer", "what it does", "source"]
        tables.append(f"## {kind.title()} mixers\n\n{table(head, rows)}")
    index = "\n\n".join([INTRODUCTION, *tables, CONTENTS % "\n".join(["catalogue", *names])])
    return {"mixers/index": index, **{f"mixers/{name}": _page(find_mixer(name)) for name in names}}


def _page(entry: MixerEntry) -> str:
    built = built_class(entry.build, Mixer)
    typed = "backbone=<host>_" if entry.kind == "channel" else "backbone.token_mixer="
    suffixed = [f"backbone={host}_" for host in entry.named_on]
    typed_as = ", ".join(f"`{start}{entry.name}`" for start in [typed, *suffixed])
    parts = [
        f"# {entry.name}\n\n{prose(_about(entry))}",
        f"* Kind: {entry.kind} mixer\n* Source: {prose(entry.source)}\n* Typed as: {typed_as}",
        "## Equation\n\n" + _equation(entry) + "\n\n" + SYMBOLS,
        f"## Data flow\n\n{_flow(entry.name)}",
        "## Shapes\n\n" + _shapes(entry, built),
        "## Options\n\n" + _options(entry, built),
        "## Parameters and multiply-adds\n\n" + _counts(entry),
        "## Hosts\n\n" + _hosts(entry),
        "## Published rows\n\n" + _rows(entry),
        "## Source, and what the paper leaves open\n\n" + _notes(entry, built),
    ]
    return "\n\n".join(parts) + "\n"


def _about(entry: MixerEntry) -> str:
    """Return the first sentence of a mixer's file, or of its own docstring in a file of several."""
    module = entry.build.__module__
    if sum(find_mixer(name).build.__module__ == module for name in list_mixers()) > 1:
        return summary(entry.build)
    text = inspect.getdoc(importlib.import_module(module)) or summary(entry.build)
    return " ".join(text.partition("\n\n")[0].split())


def _equation(entry: MixerEntry) -> str:
    lines = EQUATIONS.get(entry.name)
    if lines is None:
        return f"`{summary(built_class(entry.build, Mixer))}`"
    return "\n\n".join(f"$$\n{line}\n$$" for line in lines)


def _flow(name: str) -> str:
    size = " × ".join(map(str, (*GRID, DIM)))
    options = "".join(f", {key}={value}" for key, value in DRAWN_WITH.get(name, {}).items())
    command = f"`python docs/_ext/dataflow.py {name} {name}.svg`"
    return f"<p>\n{picture(name)}\n</p>\n\nOne image with a map of {size}{options}: {command}"


def _shapes(entry: MixerEntry, built: type) -> str:
    treated = {
        "joint": "mixed together with the map",
        "pooled": "each gets the mean of the mixed map",
        "none": "kept apart from the map"
        if entry.takes_prefix
        else "left out: the host pools its map",
    }[built.prefix_mixing]
    documented = re.search(
        r"^Shape: (.*?)(?=\n\n|\Z)",
        inspect.getdoc(entry.build) or inspect.getdoc(built) or "",
        re.M | re.S,
    )
    text = (
        prose(" ".join(documented[1].split())) if documented else "(B, H, W, C) -\\> (B, H, W, C)."
    )
    return f"{text}\n\nClass tokens: {treated}."


def _options(entry: MixerEntry, built: type) -> str:
    group = "mixer" if entry.kind == "channel" else "token_mixer"
    known = meanings(built, entry.build)
    base = entry.base
    while base is not None:
        known = {**meanings(base.build), **known}
        base = base.base
    rows = [[f"`backbone.{group}.{name}`", f"`{value}`", prose(known.get(name, ""))]
            for name, value in mixer_options(entry.name).items()]  # fmt: skip
    if not rows:
        return "This mixer has no options."
    text = table(["option", "default", "meaning"], rows)
    changed = [f"* `{host}`: {', '.join(f'`{key}={value}`' for key, value in values.items())}"
               for host, values in entry.options_on.items()]  # fmt: skip
    return text + ("\n\nDefaults of single hosts:\n\n" + "\n".join(changed) if changed else "")


def _counts(entry: MixerEntry) -> str:
    rows = []
    for host in map(find_host, COUNTED_ON):
        if entry.kind not in host.slots or why_unfit(host, entry):
            continue
        named, own = host.name, {}
        if entry.kind == "token":
            own = {"token_mixer": {"name": entry.name}}
        elif entry.name != OWN_FFN:
            named = f"{host.name}_{entry.name}"
        plain = count_model(host.name, "{}", (224, 224), "macs")
        found = count_model(named, json.dumps(own), (224, 224), "macs")
        shares = [one / other for one, other in zip(found, plain, strict=True)]
        typed = network_label((named, own)).replace("token_mixer.name=", "token_mixer=")
        rows.append([f"`{typed}`", f"{found[0]:,}", f"{shares[0]:.3f}", f"{found[1] / 1e9:.4f}",
                     f"{shares[1]:.3f}"])  # fmt: skip
    if not rows:
        return f"None of {', '.join(COUNTED_ON)} takes it."
    head = ["network", "parameters", "over the plain host", "MACs G", "over the plain host"]
    return f"With 1000 classes at 224 pixels.\n\n{table(head, rows)}"


def _hosts(entry: MixerEntry) -> str:
    able = [host for host in hosts().values() if entry.kind in host.slots]
    fitting = [host.name for host in able if not why_unfit(host, entry)]
    lines = ["Fits " + ", ".join(f"`{name}`" for name in fitting) + "."]
    lines += [f"* not `{pattern}`: {prose(reason)}" for pattern, reason in entry.unfit_for.items()]
    return "\n".join([lines[0], "", *lines[1:]])


def _rows(entry: MixerEntry) -> str:
    known = [name for name in list_backbones() if name.endswith(f"_{entry.name}")]
    pattern = OWN_IN.get(entry.name, "")
    known += [name for name in hosts() if fnmatch.fnmatch(name, pattern)]
    found = paper_counts.of_mixer(entry.name, known)
    text = rows_table(found) or "The papers of `configs/published` report no row with it."
    return f"It is the own token mixer of the hosts `{pattern}`.\n\n{text}" if pattern else text


def _notes(entry: MixerEntry, built: type) -> str:
    """Return the docstrings of the files that define it, and of the package of its paper."""
    names = dict.fromkeys(
        [entry.build.__module__, built.__module__, entry.build.__module__.rpartition(".")[0]]
    )
    texts = [
        inspect.getdoc(importlib.import_module(name)) or ""
        for name in names
        if name.startswith("backbones.mixers.")
    ]
    return "\n\n".join(docstring(text) for text in texts if "Source:" in text)


def docstring(text: str) -> str:
    """Convert a docstring to Markdown: indented equations become code."""
    blocks = []
    for block in text.split("\n\n"):
        if block.startswith("    "):
            blocks.append(f"```text\n{inspect.cleandoc(block)}\n```")
        elif block.startswith("|"):
            blocks.append(block.replace("``", "`"))
        else:
            lines = [line.strip() for line in block.splitlines()]
            joined = "\n".join(lines)
            items = re.split(r"^\* ", joined, flags=re.M)
            blocks.append(
                "\n".join(
                    [prose(items[0]), *(f"* {prose(' '.join(item.split()))}" for item in items[1:])]
                ).strip()
            )
    return "\n\n".join(blocks)
