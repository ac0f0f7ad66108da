"""Parse a network as every command takes it: ``backbone=NAME`` and ``backbone.OPTION=VALUE``.

Values follow Hydra's grammar, as in run.py.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf

from backbones.options import matches_of, unknown
from tasks.engine.family import Family
from tools.cli.arguments import select_backbones
from tools.cli.catalogue import catalogue
from tools.cli.grammar import apply, expand, format_value, key_of, parse
from tools.cli.nested_config import deep_merge
from tools.cli.quoting import quote_arguments

PREFIX = "backbone."
TOKEN_MIXER = "backbone.token_mixer"
MIXER = "backbone.mixer"
FREE = "backbone.options"  # of another library, such as timm
MATCH = (f"{MIXER}.match", f"{TOKEN_MIXER}.match")  # solved before a network is built
Network = tuple[str, dict[str, Any]]  # name and options, for create_backbone


def split_backbone_options(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments into options of the backbone and all others."""
    words = [argument for argument in arguments if key_of(argument).startswith(PREFIX)]
    return words, [argument for argument in arguments if argument not in words]


def read_networks(
    text: str, words: Sequence[str] = (), family: Family | None = None
) -> list[Network]:
    """Parse comma-separated names and patterns, with options that apply to all of them.

    Args:
        text: ``deit_t,swin_*``; a name may be followed by its own options, as in
            ``deit_t_afbo backbone.mixer.g2=6,deit_t``.
        words: Options such as ``backbone.mixer.g2=6``; each of several values, as in
            ``backbone.mixer.g2=4,6``, makes a network.
        family: Task family of the networks; None accepts every modality.

    Raises:
        ValueError: A name or option is unknown; the message suggests the nearest. Or a network
            has another modality than the family.
    """
    networks = []
    text, words = _join_channel_mixer(text, quote_arguments(words, sweep=True))
    for item in split_outside_brackets(text, ","):
        pattern, *own_words = split_outside_brackets(item, " ") if item.strip() else [""]
        for name in select_backbones(pattern, family):
            for job in expand([*words, *quote_arguments([*filter(None, own_words)])]):
                options = read_options(job, name, known_options(name))
                networks.append((name, _with_solved_widths(name, options)))
    return networks


def _with_solved_widths(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return options with the widths that ``match=`` asks for, and print what was chosen."""
    if not any(matches_of(options.get(group)) for group in ("mixer", "token_mixer")):
        return options
    solved: dict[str, Any] = json.loads(_solve_once(name, json.dumps(options)))
    return solved


@functools.cache
def _solve_once(name: str, options: str) -> str:
    from backbones.analysis.matching import solve_match

    def report(line: str) -> None:
        print(line, file=sys.stderr)

    return json.dumps(solve_match(name, report=report, **json.loads(options)))


def read_network(text: str, words: Sequence[str] = (), family: Family | None = None) -> Network:
    """Parse a single network; see ``read_networks``.

    Raises:
        ValueError: A name or option is unknown, or several networks are given.
    """
    networks = read_networks(text, words, family)
    if len(networks) > 1:
        raise ValueError(
            f"{' '.join([f'backbone={text}', *words])} names {len(networks)} networks; this "
            "command takes one"
        )
    return networks[0]


def run_options(run: Mapping[str, Any] | None, name: str) -> dict[str, Any]:
    """Return the backbone options of a run, for ``create_backbone``.

    Args:
        run: Its config; None for a file outside of run folders.
        name: The requested backbone.

    Raises:
        ValueError: The run has another backbone.
    """
    backbone = (run or {}).get("backbone", {})
    if backbone and backbone["name"] != name:
        raise ValueError(f"ckpt= holds {backbone['name']}, not {name}; leave backbone= out")
    options = {k: v for k, v in backbone.items() if k not in ("name", "pretrained", "dense")}
    if isinstance(options.get("token_mixer"), str):  # typed options may add to it
        options["token_mixer"] = {"name": options["token_mixer"]}
    return options


def known_options(name: str) -> list[str]:
    """List the options of a backbone as users type them."""
    listing, names = catalogue(), []
    for option, default in listing.schema(name).items():
        inner = list(default) if isinstance(default, Mapping) else []
        if option == "token_mixer":
            tokens = listing.list_mixers("token")
            inner = ["name", *(key for mixer in tokens for key in listing.mixer(mixer)["options"])]
        if option != "name":
            names += [PREFIX + option, *(f"{PREFIX}{option}.{key}" for key in inner)]
    return list(dict.fromkeys([*names, *MATCH]))


def read_options(words: Sequence[str], of: str, valid_names: Collection[str]) -> dict[str, Any]:
    """Return options as a dict, nested where their names have dots.

    Args:
        words: Options with one value each.
        of: What they belong to, for messages.
        valid_names: The valid option names, as typed.

    Raises:
        ValueError: An option is unknown, or a value cannot be parsed.
    """
    for word in words:
        key = key_of(word)
        if key == f"{PREFIX}name":
            raise ValueError(f"{word} is not an option; pass backbone=NAME instead")
        # Another library checks its options itself.
        if key not in valid_names and not (key.startswith(f"{FREE}.") and FREE in valid_names):
            prefixed = [name for name in valid_names if name.endswith(f".{key}")]
            raise ValueError(unknown(f"option of {of}", key, prefixed or valid_names))
    config = OmegaConf.create({"backbone": {}})
    apply(config, quote_arguments(words))
    options: dict[str, Any] = OmegaConf.to_container(config)["backbone"]  # type: ignore[call-overload, index, assignment]
    if isinstance(options.get("token_mixer"), str):  # typed options may add to it
        options["token_mixer"] = {"name": options["token_mixer"]}
    return options


def merge_options(options: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Merge more options into options; a token mixer of another name replaces the old one."""
    merged = deep_merge(options, more)
    before, after = options.get("token_mixer"), more.get("token_mixer")
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        names = {mixer["name"] for mixer in (before, after) if "name" in mixer}
        merged["token_mixer"] = merged["token_mixer"] if len(names) < 2 else after
    return merged


def join_channel_mixer(arguments: Sequence[str]) -> list[str]:
    """Rewrite ``backbone=HOST backbone.mixer.name=MIXER`` as ``backbone=HOST_MIXER``.

    A list of mixers stays as it is.

    Several hosts and mixers, separated by commas, give all pairs.
    """
    text = next((word for word in arguments if word.startswith("backbone=")), None)
    if text is None:
        return list(arguments)
    joined, rest = _join_channel_mixer(text.removeprefix("backbone="), arguments)
    return [f"backbone={joined}" if word == text else word for word in rest]


def _join_channel_mixer(text: str, words: Sequence[str]) -> tuple[str, list[str]]:
    """Return backbones with the channel mixer that an option names, and the other options."""
    words = [part for word in words for part in _split_named_mixer(word)]
    choices = [word for word in words if re.match(rf"\+*{MIXER}(\.name)?=[^{{\[]", word)]
    if not choices:
        return text, list(words)
    listing = catalogue()
    mixers = choices[-1].partition("=")[2].split(",")
    names = []
    for name in text.split(","):
        host = listing.host_of(name)
        for mixer in mixers:
            if mixer in ("null", "ffn"):
                names.append(host)
                continue
            mixer = listing.channel_mixer(mixer)
            if name not in (host, f"{host}_{mixer}"):
                raise ValueError(
                    f"{name} already has a channel mixer; pass backbone={host} {choices[-1]}"
                )
            names.append(f"{host}_{mixer}")
    return ",".join(names), [word for word in words if word not in choices]


def _split_named_mixer(word: str) -> list[str]:
    """Split ``backbone.mixer={name: glu, act: mish}`` into its name and its other options."""
    if not re.match(rf"\+*{MIXER}={{", word):
        return [word]
    parsed = parse(word)
    value = None if parsed.is_sweep_override() else parsed.value()
    if not isinstance(value, Mapping) or "name" not in value:
        return [word]
    return format_options({"mixer": value})


def format_options(options: Mapping[str, Any], prefix: str = PREFIX) -> list[str]:
    """Format options as users type them, for example ``backbone.mixer.g2=6``."""
    flat = []
    for key, value in options.items():
        nested = isinstance(value, Mapping)
        flat += (
            format_options(value, f"{prefix}{key}.")
            if nested
            else [f"{prefix}{key}={format_value(value)}"]
        )
    return flat


def network_label(network: Network, prefix: str = PREFIX) -> str:
    """Format a network's name and options as users type them."""
    return " ".join([network[0], *format_options(network[1], prefix)])


def split_outside_brackets(text: str, sign: str) -> list[str]:
    """Split a text at a sign outside of brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "[{(") - (character in "]})")
        if character == sign and depth <= 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts
