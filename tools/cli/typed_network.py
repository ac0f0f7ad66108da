"""A network as it is typed in every command: ``backbone=NAME`` and ``backbone.OPTION=VALUE``.

Values are read by Hydra's grammar, which is the one that run.py has.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from backbones.options import unknown
from tools.cli.arguments import select
from tools.cli.catalogue import catalogue
from tools.cli.literal import literal
from tools.cli.nested_config import merge
from tools.cli.ranges import check_ranges, count_jobs

PREFIX = "backbone."
TOKEN_MIXER = "backbone.token_mixer"
Network = tuple[str, dict[str, Any]]  # name and options, for create_backbone


def separate(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words among arguments that set options of the backbone, and the other arguments."""
    words = [one for one in arguments if one.lstrip("+").startswith(PREFIX)]
    return words, [one for one in arguments if one not in words]


def read_networks(text: str, words: Sequence[str] = ()) -> list[Network]:
    """Networks out of names, patterns and words that hold for all of them.

    Args:
        text: ``deit_t,swin_*``; a name may have words of its own behind it, as in
            ``deit_t_afbo backbone.mixer.g2=6,deit_t``.
        words: Such as ``backbone.mixer.g2=6``; of several values, ``backbone.mixer.g2=4,6``, each
            makes a network of its own.

    Raises:
        ValueError: An unknown name or option, with the nearest ones.
    """
    networks = []
    for item in split_outside(text, ","):
        typed, *own = split_outside(item, " ") if item.strip() else [""]
        for name in select(typed):
            for chosen in jobs([*words, *filter(None, own)]):
                networks.append((name, read_options(chosen, name, known_options(name))))
    return networks


def read_network(text: str, words: Sequence[str] = ()) -> Network:
    """The one network that is typed.

    Raises:
        ValueError: An unknown name or option, or several of them.
    """
    found = read_networks(text, words)
    if len(found) > 1:
        raise ValueError(
            f"{' '.join([f'backbone={text}', *words])} names {len(found)} networks; this command "
            "takes one"
        )
    return found[0]


def options_of_run(run: Mapping[str, Any] | None, name: str) -> dict[str, Any]:
    """Return the options that a run gave its backbone, for ``create_backbone``.

    Args:
        run: Its config; None for a file that lies in no run folder.
        name: Of the backbone that is asked for.

    Raises:
        ValueError: The run has another backbone.
    """
    given = (run or {}).get("backbone", {})
    if given and given["name"] != name:
        raise ValueError(f"ckpt= holds {given['name']}, not {name}; leave backbone= out")
    options = {k: v for k, v in given.items() if k not in ("name", "pretrained", "dense")}
    if isinstance(options.get("token_mixer"), str):  # what is typed may add to it
        options["token_mixer"] = {"name": options["token_mixer"]}
    return options


def known_options(name: str) -> list[str]:
    """The options of a backbone as they are typed."""
    registered, known = catalogue(), []
    for option, default in registered.schema(name).items():
        inner = list(default) if isinstance(default, Mapping) else []
        if option == "token_mixer":
            tokens = registered.list_mixers("token")
            inner = ["name", *(key for one in tokens for key in registered.mixer(one)["options"])]
        if option != "name":
            known += [PREFIX + option, *(f"{PREFIX}{option}.{key}" for key in inner)]
    return list(dict.fromkeys(known))


def read_options(words: Sequence[str], of: str, known: Collection[str]) -> dict[str, Any]:
    """The options that words set, nested where their names have dots.

    Args:
        words: One value each.
        of: What they are options of.
        known: The options there are, as they are typed.

    Raises:
        ValueError: An unknown option, or a text that is no value.
    """
    options: dict[str, Any] = {}
    for word in words:
        key, equals, _ = word.lstrip("+").partition("=")
        if key == f"{PREFIX}name":
            raise ValueError(f"{word} is refused: pass backbone=NAME, whose options these then are")
        if not equals or key not in known:
            meant = [one for one in known if one.endswith(f".{key}")]  # without what stands before
            raise ValueError(unknown(f"option of {of}", key, meant or known))
        value = _parsed(word).value()
        if key == TOKEN_MIXER and isinstance(value, str):
            value = {"name": value}
        for part in reversed(key.removeprefix(PREFIX).split(".")):
            value = {part: value}
        options = merged(options, value)
    check_ranges({"backbone": options})
    return options


def merged(options: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Merge more options into options; a token mixer of another name replaces the old one."""
    both = merge(options, more)
    old, new = options.get("token_mixer"), more.get("token_mixer")
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        names = {one["name"] for one in (old, new) if "name" in one}
        both["token_mixer"] = both["token_mixer"] if len(names) < 2 else new
    return both


def jobs(words: Sequence[str]) -> list[list[str]]:
    """Words with one value each, for every combination of the values of those with several.

    Raises:
        ValueError: A text that is no value, or a range without steps.
    """
    choices = []
    count_jobs(map(_parsed, words))
    for word in words:
        parsed = _parsed(word)
        if not parsed.is_sweep_override():
            choices.append([word])
        elif parsed.is_discrete_sweep():
            key = parsed.get_key_element()
            choices.append([f"{key}={value}" for value in parsed.sweep_string_iterator()])
        else:
            raise ValueError(f"{word} has no end of values; write those meant, as in KEY=1,2,3")
    return [list(chosen) for chosen in itertools.product(*choices)]


def _parsed(word: str) -> Any:
    """Hydra's reading of a word."""
    if "=" not in word:
        raise ValueError(
            f"cannot use {word!r}; an option of a backbone is typed backbone.KEY=VALUE"
        )
    try:
        return OverridesParser.create().parse_override(literal([word], sweep=True)[0])
    except HydraException as error:
        raise ValueError(
            f"{word} cannot be read; a value is a number, true, false, null, a word, a list such "
            "as [1,2] or a dict such as {name: sbm, rank: 32}"
        ) from error


def one_token_mixer(arguments: Sequence[str]) -> list[str]:
    """A command of run.py in which the words on the token mixer are such as Hydra takes together.

    Hydra's config has no token mixer, so its keys are to be added (``++``), and the name beside
    them is one of the keys. Those that the mixer lacks are refused where it is built.
    """
    keys = [argument.partition("=")[0].lstrip("+") for argument in arguments]
    several = any(key.startswith(f"{TOKEN_MIXER}.") for key in keys)
    found = []
    for key, argument in zip(keys, arguments, strict=True):
        value = argument.partition("=")[2]
        if several and key == TOKEN_MIXER and not value.startswith("{"):
            argument = f"++{TOKEN_MIXER}.name={value}"
        elif key.startswith(f"{TOKEN_MIXER}.") and not argument.startswith("~"):
            argument = f"++{argument.lstrip('+')}"
        found.append(argument)
    return found


def written(options: Mapping[str, Any], prefix: str = PREFIX) -> list[str]:
    """Options as they are typed, for example ``backbone.mixer.g2=6``."""
    flat = []
    for key, value in options.items():
        nested = isinstance(value, Mapping)
        flat += written(value, f"{prefix}{key}.") if nested else [f"{prefix}{key}={_word(value)}"]
    return flat


def _word(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return str(value)


def label(network: Network, prefix: str = PREFIX) -> str:
    """Name and options as they are typed."""
    return " ".join([network[0], *written(network[1], prefix)])


def split_outside(text: str, sign: str) -> list[str]:
    """A text split at a sign, but not within brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "[{(") - (character in "]})")
        if character == sign and depth <= 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts
