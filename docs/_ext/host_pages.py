"""One page for every family of hosts, from the registry."""

from __future__ import annotations

import importlib
import inspect

import paper_counts
from markup import prose, table
from mixer_pages import CONTENTS, docstring
from paper_pages import rows_table

from backbones import backbone_schema, create_backbone
from backbones.options.meanings import meanings, summary
from backbones.registry import HostEntry, hosts
from tools.complexity import count_model

INTRODUCTION = """# Hosts

A host is a backbone that mixers are put into. `backbone=<host>` builds it with its own parts, and
`backbone=<host>_<channel mixer>` with a mixer in place of every feed-forward network.
[A host](../../tutorials/host.md) shows how to add one.
"""
PAGE = """# {family}

{notes}

## Sizes

Counts are those of the classifier with 1000 classes at 224 pixels.

{sizes}

## Options

Those of `{host}`. `backbone.mixer` and `backbone.token_mixer` take the options of the mixers.

{options}

## Published rows of the plain hosts

{published}
"""


def pages() -> dict[str, str]:
    """Return the pages."""
    families: dict[str, list[HostEntry]] = {}
    for host in hosts().values():
        families.setdefault(_family(host), []).append(host)
    rows = [
        [f"[{family}]({family}.md)", ", ".join(f"`{one.name}`" for one in found), found[0].source]
        for family, found in families.items()
    ]
    index = (
        INTRODUCTION
        + "\n"
        + table(["family", "hosts", "source"], rows)
        + "\n"
        + CONTENTS % "\n".join(families)
    )
    return {
        "hosts/index": index,
        **{f"hosts/{family}": _page(family, found) for family, found in families.items()},
    }


def _family(host: HostEntry) -> str:
    return host.build.__module__.removeprefix("backbones.hosts.").split(".")[0]


def _page(family: str, found: list[HostEntry]) -> str:
    module = importlib.import_module(f"backbones.hosts.{family}")
    rows = []
    for host in found:
        params, macs = _count(host)
        rows.append([f"`{host.name}`", prose(summary(host.build)), params, macs, host.patch_size,
                     " and ".join(host.slots) or "none", prose(host.source)])  # fmt: skip
    head = ["host", "size", "parameters", "MACs G", "first stride", "mixers", "source"]
    known = meanings(create_backbone, found[0].build)
    schema = {key: value for key, value in backbone_schema(found[0].name).items() if key != "name"}
    options = table(
        ["option", "default", "meaning"],
        [
            [f"`backbone.{key}`", f"`{value}`", prose(known.get(key, ""))]
            for key, value in schema.items()
        ],
    )
    reported = paper_counts.of_backbone([host.name for host in found])
    published = rows_table(reported)
    return PAGE.format(
        family=family,
        notes=docstring(inspect.getdoc(module) or ""),
        sizes=table(head, rows),
        host=found[0].name,
        options=options,
        published=published or "No paper of `configs/published` reports a row of the plain hosts.",
    )


def _count(host: HostEntry) -> tuple[str, str]:
    if host.modality != "image":
        return "", ""
    params, macs = count_model(host.name, "{}", (224, 224), "macs")
    return f"{params:,}", f"{macs / 1e9:.4f}"
