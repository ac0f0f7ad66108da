"""Find networks of a table that differ from others of their host in more than the mixer."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tools.cli.typed_network import Network, network_label
from tools.comparing.terms import FACTS

MOST = 3  # maximum number of networks that are described


def describe_unequal_networks(networks: Sequence[Network], *, dense: bool = False) -> str | None:
    """Name networks that differ from others of their host in more than their mixers.

    Networks with other options than their mixers' are excluded: their names show the difference.

    Returns:
        A line, or None if all differ in their mixers only.
    """
    lines = [
        _format_host(host, facts)
        for host, facts in _groups(networks, dense)
        if len({json.dumps(entry, sort_keys=True) for entry in facts.values()}) > 1
    ]
    return f"not on equal terms apart from the mixer: {'; '.join(lines)}" if lines else None


def describe_differences(networks: Sequence[Network], *, dense: bool = False) -> list[str]:
    """Describe networks of a table that differ from others, or from their host, beyond the mixer.

    Returns:
        The line of ``describe_unequal_networks``, and for other hosts the note that run.py logs
        when it builds the network, such as a missing class token.
    """
    line = describe_unequal_networks(networks, dense=dense)
    notes: list[str | None] = []
    for host, facts in _groups(networks, dense):
        differ = len({json.dumps(entry, sort_keys=True) for entry in facts.values()}) > 1
        if not differ and host not in facts:  # the host itself is not listed, so notes are needed
            variants = [network for network in networks if network_label(network) in facts]
            notes += [_unlike(name, json.dumps(options), dense) for name, options in variants]
    sentences = list(dict.fromkeys(filter(None, notes)))
    more = [f"and {len(sentences) - MOST} more differ from their hosts"]
    return [*([line] if line else []), *sentences[:MOST], *(more if len(sentences) > MOST else [])]


def _groups(
    networks: Sequence[Network], dense: bool
) -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    """Yield each host with the facts of its networks that differ only in mixers, by name."""
    from backbones.registry import look_up

    hosts: dict[tuple[str, str], list[Network]] = {}
    for name, options in networks:
        rest = {key: value for key, value in options.items() if key not in ("mixer", "token_mixer")}
        key = (look_up(name)[0].name, json.dumps(rest, sort_keys=True))
        hosts.setdefault(key, []).append((name, options))
    for (host, _), group in hosts.items():
        yield host, {network_label(net): _facts(net[0], json.dumps(net[1]), dense) for net in group}


def _format_host(host: str, facts: Mapping[str, Mapping[str, Any]]) -> str:
    """Format ``deit_t with class tokens 1 (deit_t), with class tokens 0 (deit_t_iffn)``."""
    differ = [key for key in FACTS if len({str(entry[key]) for entry in facts.values()}) > 1]
    keys = [key for key in differ if key != "host_parameters"] or differ
    groups: dict[str, list[str]] = {}
    for name, entry in facts.items():
        words = ", ".join(f"{FACTS[key]} {entry[key]}" for key in keys)
        groups.setdefault(words, []).append(name)
    return f"{host} " + ", ".join(f"with {key} ({_few(names)})" for key, names in groups.items())


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + f" and {len(names) - 3} more" * (len(names) > 3)


@functools.cache
def _unlike(name: str, options: str, dense: bool) -> str | None:
    import torch

    from backbones import create_backbone
    from backbones.analysis.description import unlike_host

    values = json.loads(options)
    with torch.device("meta"):
        return unlike_host(create_backbone(name, dense=dense, **values))


@functools.cache
def _facts(name: str, options: str, dense: bool) -> dict[str, Any]:
    import torch

    from backbones import create_backbone
    from backbones.analysis.description import describe_network

    with torch.device("meta"):
        return describe_network(create_backbone(name, dense=dense, **json.loads(options)))
