"""One line beside tables of networks: which ones are built otherwise than others of their host."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from tools.command_line.typed_network import Network, label
from tools.comparing.terms import FACTS


def built_otherwise(networks: Sequence[Network], *, dense: bool = False) -> str | None:
    """Name networks that differ from others of their host in more than their mixers.

    Networks with other options than mixers' show these in their names, and are left out.

    Args:
        networks: Of one table, as they are typed.
        dense: They are built for dense prediction.

    Returns:
        A line, or None where all differ in their mixers alone.
    """
    from backbones.registry import look_up

    hosts: dict[tuple[str, str], list[Network]] = {}
    for name, own in networks:
        others = {key: value for key, value in own.items() if key not in ("mixer", "token_mixer")}
        alike = (look_up(name)[0].name, json.dumps(others, sort_keys=True))
        hosts.setdefault(alike, []).append((name, own))
    lines = []
    for (host, _), group in hosts.items():
        facts = {label(one): _facts(one[0], json.dumps(one[1]), dense) for one in group}
        if len({json.dumps(own, sort_keys=True) for own in facts.values()}) > 1:
            lines.append(_of_host(host, facts))
    return f"not on equal terms but for the mixer: {'; '.join(lines)}" if lines else None


def _of_host(host: str, facts: Mapping[str, Mapping[str, Any]]) -> str:
    """``deit_t with class tokens 1: deit_t, deit_t_afbo, with class tokens 0: deit_t_iffn``."""
    differ = [key for key in FACTS if len({str(own[key]) for own in facts.values()}) > 1]
    said = [key for key in differ if key != "host_parameters"] or differ
    groups: dict[str, list[str]] = {}
    for name, own in facts.items():
        words = ", ".join(f"{FACTS[key]} {own[key]}" for key in said)
        groups.setdefault(words, []).append(name)
    return f"{host} " + ", ".join(f"with {key} ({_few(names)})" for key, names in groups.items())


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + f" and {len(names) - 3} more" * (len(names) > 3)


@functools.cache
def _facts(name: str, options: str, dense: bool) -> dict[str, Any]:
    import torch

    from backbones import create_backbone
    from backbones.analysis.description import describe_network

    with torch.device("meta"):
        return describe_network(create_backbone(name, dense=dense, **json.loads(options)))
