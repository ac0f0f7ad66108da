"""List which models of timm take mixers, and why parts of others keep their own module.

usage: python tools/timm_slots.py [key=value ...]

  model=PATTERN            models of timm, such as 'vit_*' or hiera_tiny_224,swin_* (default: all)
  format=table             table, json, or families: one row per family
  try=true                 true builds each model on the meta device, without values and weights;
                           false reads the list that comes with MixerLab
  write=false              true stores the result of all models as that list

A model is a host by backbone=timm backbone.model=NAME. channel and token are the numbers of
feed-forward networks and token mixers that mixers may replace. A part that keeps its own module is
named with * for numbers, and with the reason.
"""

from __future__ import annotations

import fnmatch
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

# As a script, Python only finds modules in tools/; the packages are one level up.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.cli.arguments import parse_options
from tools.cli.command import exit_with, run_command
from tools.cli.tables import Record, write

DEFAULTS = {"model": "*", "format": "table", "try": "true", "write": "false"}
CHOICES = {
    "format": ("table", "json", "families"),
    "try": ("true", "false"),
    "write": ("true", "false"),
}

COLUMNS = {
    "backbone": ("model", "{}"),
    "paper": ("family", "{}"),
    "models": ("models", "{}"),
    "channel": ("channel", "{}"),
    "token": ("token", "{}"),
    "experiment": ("example", "{}"),
    "settings": ("keeps its own", "{}"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, or 2 after an error."""
    return run_command("timm_slots.py", __doc__, print_slots, arguments)


def print_slots(arguments: Sequence[str]) -> None:
    """Print the list, and store it if asked to."""
    options = parse_options(arguments, DEFAULTS, CHOICES)
    if options["write"] == "true" and (options["model"], options["try"]) != ("*", "true"):
        raise ValueError("write=true stores all models; leave model= and try= out")
    table = dict(_find(options["model"].split(","), is_tried=options["try"] == "true"))
    if not table:
        raise ValueError(f"no model of timm matches model={options['model']}; try model='vit_*'")
    if options["write"] == "true":
        from backbones.hosts.timm_model.listing import write_list

        write_list(table)
    if options["format"] == "json":
        print(json.dumps({name: asdict(slots) for name, slots in table.items()}, indent=2))
    elif options["format"] == "families":
        write(list(_by_family(table)), "table", COLUMNS)
    else:
        write([_record(name, slots) for name, slots in table.items()], "table", COLUMNS)


def _find(patterns: Sequence[str], *, is_tried: bool) -> Iterator[tuple[str, Any]]:
    from backbones.hosts.timm_model import listing

    if is_tried:
        yield from listing.try_models(listing.find_models(patterns))
        return
    for name, slots in listing.read_list().items():
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            yield name, slots


def _record(name: str, slots: Any) -> Record:
    reasons = [f"{part}: {why}" for part, why in slots.kept.items()]
    return {
        "backbone": name, "channel": slots.channel, "token": slots.token,
        "settings": slots.error or "; ".join(reasons),
    }  # fmt: skip


def _by_family(table: dict[str, Any]) -> Iterator[Record]:
    from backbones.hosts.timm_model.listing import count_families

    for count in count_families(table):
        yield {
            "paper": count.family, "models": count.models, "channel": count.channel,
            "token": count.token, "experiment": count.example,
        }  # fmt: skip


if __name__ == "__main__":
    exit_with(main)
