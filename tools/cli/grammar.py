"""Hydra's grammar of options: parse words, expand several values, apply them to a config."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from backbones.options import shortened, unknown

MOST_RUNS = 10_000  # per sweep
MIXERS = ("backbone.mixer", "backbone.token_mixer")


def parse(word: str) -> Override:
    """Parse one option.

    Raises:
        ValueError: It is not ``key=value`` in Hydra's grammar.
    """
    try:
        override = OverridesParser.create().parse_override(word)
    except HydraException:
        raise ValueError(
            f"cannot read {shortened(word)}; type key=value with a number, true, false, null, a "
            "word, a list such as [1,2] or a dict such as {name: sbm, rank: 32}"
        ) from None
    if not override.key_or_group:
        raise ValueError(f"{word} lacks an option name; type key=value")
    return override


def key_of(word: str) -> str:
    """Return the key of an option without its signs."""
    return word.partition("=")[0].lstrip("+~")


def expand(
    words: Sequence[str], options: Callable[[str], Sequence[str]] | None = None
) -> list[list[str]]:
    """Expand options with several values into every combination of one value each.

    Args:
        words: As typed.
        options: Returns the options of a group, for ``glob``; None without groups.

    Raises:
        ValueError: A value cannot be parsed, there are more than ``MOST_RUNS`` combinations, or an
            option has zero or infinitely many values.
    """
    choices, total = [], 1
    for override in map(parse, words):
        line = str(override.input_line)
        if not override.is_sweep_override():
            choices.append([line])
            continue
        value = override.value()
        if isinstance(value, Glob) and options is not None:
            texts = value.filter(list(options(override.key_or_group)))
        else:
            try:
                texts = list(itertools.islice(override.sweep_string_iterator(), MOST_RUNS + 1))
            except HydraException:
                raise ValueError(
                    f"{line} has no end or no step; list the values, as in KEY=1,2,3"
                ) from None
        total *= len(texts)
        if not 0 < total <= MOST_RUNS:
            count = f"more than {MOST_RUNS:,}" if total else "0"
            raise ValueError(
                f"{shortened(line)} makes {count} combinations of values; pass 1 to {MOST_RUNS:,}"
            )
        choices.append([f"{override.get_key_element()}={text}" for text in texts])
    return [list(job) for job in itertools.product(*choices)]


def apply(config: DictConfig, words: Sequence[str]) -> None:
    """Set or remove the options that words name; missing ones are added.

    What an option belongs to refuses those that it lacks.

    Args:
        config: Changed in place.
        words: Options with one value each.

    Raises:
        ValueError: An option to remove is missing, or belongs to a list of mixers.
    """
    for word in words:
        override = parse(word)
        key = override.key_or_group
        if override.is_delete():
            _remove(config, key)
        else:
            _set(config, key, override.value())


def _remove(config: DictConfig, key: str) -> None:
    parent, _, leaf = key.rpartition(".")
    node = OmegaConf.select(config, parent) if parent else config
    if not isinstance(node, DictConfig) or leaf not in node:
        names = list(node) if isinstance(node, DictConfig) else []
        raise ValueError(unknown(f"option to remove of {parent or 'the config'}", leaf, names))
    with open_dict(node):
        node.pop(leaf)


def _set(config: DictConfig, key: str, value: Any) -> None:
    mixer = next((name for name in MIXERS if key == name or key.startswith(f"{name}.")), None)
    if mixer is not None:
        key, value = _join_mixer(config, mixer, key, value)
    merge = isinstance(value, dict) and "_target_" not in value
    OmegaConf.update(config, key, value, merge=merge, force_add=True)


def _join_mixer(config: DictConfig, mixer: str, key: str, value: Any) -> tuple[str, Any]:
    """Return the option to set, where a mixer's name and its options are typed apart."""
    node = OmegaConf.select(config, mixer)
    option = key.removeprefix(mixer).removeprefix(".")
    if isinstance(node, ListConfig) and option == "match":
        return mixer, [_with_match(entry, value) for entry in list(node)]
    if isinstance(node, ListConfig) and option:
        raise ValueError(
            f"{mixer} is a list, so {key} has no mixer to belong to; write it into entries, as in "
            f"{{name: glu, {option}: {value}}}"
        )
    if isinstance(node, str) and option:
        OmegaConf.update(config, mixer, {"name": node}, merge=False)
    if isinstance(node, DictConfig) and not option and isinstance(value, str):
        return (f"{mixer}.name", value) if node.get("name") in (None, value) else (key, value)
    if isinstance(node, DictConfig) and not option and isinstance(value, list):
        match = node.get("match")  # typed before the list
        return key, [_with_match(entry, match) for entry in value] if match else value
    return key, value


def _with_match(entry: Any, match: Any) -> Any:
    """Return an entry of a list of mixers with ``match``; null keeps the host's own."""
    return entry and {**({"name": entry} if isinstance(entry, str) else entry), "match": match}


def format_value(value: Any) -> str:
    """Format a value as users type it."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(format_value, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {format_value(v)}' for key, v in value.items())}}}"
    return str(value)
