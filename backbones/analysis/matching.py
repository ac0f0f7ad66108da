"""Mixers of equal size: the width with which a network has the plain host's parameters or FLOPs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from backbones.analysis.counting import count_macs, count_parameters
from backbones.base import Backbone
from backbones.factory import create_backbone, mixer_options
from backbones.options import check_value, matches_of
from backbones.registry import OWN_FFN, find_mixer, look_up

logger = logging.getLogger(__name__)

Match = Literal["params", "macs"]
KINDS = {"mixer": "channel", "token_mixer": "token"}
# A mixer's option of its size, the first that it has.
WIDTHS = ("hidden_ratio", "expansion", "rank_ratio", "rank", "ratio")
USUAL = 4.0  # hidden width of most FFNs over C
TOLERANCE = 0.01  # of the plain host's count
# Inputs that are counted where a host leaves their size open.
SERIES_VARIABLES, POINTS = 7, 10_000
CLOSE = TOLERANCE / 4  # ends the search
ROUNDS = 3
STARTS = (4, 2, 1, 0.5, 0.25, 8, 16, 32, 3, 6)
# Ratios with fine and with coarse steps: groups may have to divide the hidden width.
STEPS = (1e-4, 1 / 48, 1 / 24, 1 / 16, 1 / 8, 1 / 6, 1 / 4, 1 / 3, 1 / 2)


@dataclass(frozen=True)
class _Width:
    """Width of one mixer, which is solved.

    Attributes:
        mixer: The mixer's name.
        option: One of ``WIDTHS``.
        usual: Its value where the search is at ``USUAL``.
    """

    mixer: str
    option: str
    usual: float

    def at(self, ratio: float) -> dict[str, float]:
        """Return the option at a point of the search."""
        value = round(self.usual * ratio / USUAL, 4)
        if isinstance(self.usual, int):
            return {self.option: max(1, round(value))}
        return {self.option: int(value) if value.is_integer() else value}


def solve_match(
    name: str, *, report: Callable[[str], object] = logger.info, **options: Any
) -> dict[str, Any]:
    """Return options of ``create_backbone`` with the width of a mixer solved for equal size.

    ``mixer={"match": "params"}`` asks for the parameters of the plain host to 1 %, "macs" for its
    multiply-adds at the build resolution. ``token_mixer`` takes ``match`` as well. In a list, the
    entries with ``match`` get their usual widths times one common factor; those with a width of
    their own, or without an option for it, keep theirs.

    Args:
        name: One of ``list_backbones()``.
        report: Gets a line on what was solved; by default it is logged.
        **options: Of ``create_backbone``; those without ``match`` are returned as they are.

    Raises:
        ValueError: The mixer lacks an option for its width, its width is given too, or no width
            gives the plain host's size to 1 %.

    >>> options = solve_match("deit_t_glu", mixer={"match": "params"}, img_size=64)
    >>> round(options["mixer"]["hidden_ratio"], 2)
    2.66
    """
    match_of_group: dict[str, Match] = {}
    for group in KINDS:
        for match in matches_of(options.get(group)):
            check_value(f"backbone.{group}.match", match, Match)
            if match_of_group.setdefault(group, match) != match:
                raise ValueError(
                    f"backbone.{group} has match=params and match=macs; give one of them to all "
                    "entries of the list"
                )
    if len(match_of_group) > 1:
        raise ValueError(
            f"match solves one width; give it to one of {' and '.join(match_of_group)}"
        )
    if not match_of_group:
        return options
    groups = {group: options[group] for group in KINDS if group in options}
    options = {**options, **{group: _without_match(entry) for group, entry in groups.items()}}
    for group, match in match_of_group.items():
        solved, line = _solve(name, options, group, match, _entries(groups[group]))
        report(line)
        options = {**options, group: solved}
    return options


def _entries(entry: Any) -> list[Any]:
    """Return the mixers in ``mixer=`` or ``token_mixer=``, one or one per stage or block."""
    return list(entry) if isinstance(entry, list | tuple) else [entry]


def _without_match(choices: Any) -> Any:
    """Return ``mixer=`` or ``token_mixer=`` without the keys ``match``."""
    if isinstance(choices, list | tuple):
        return [_without_match(entry) for entry in choices]
    if not isinstance(choices, Mapping):
        return choices
    return {key: value for key, value in choices.items() if key != "match"}


def _solve(
    name: str, options: Mapping[str, Any], group: str, match: Match, entries: Sequence[Any]
) -> tuple[Any, str]:
    """Return a group's mixers with solved widths, and a line on them."""
    host, _ = look_up(name)
    key, mixer = f"backbone.{group}", options[group]
    several = isinstance(mixer, list | tuple)
    reference = options.get("model", host.name)  # a network of timm has its own name
    rest = {option: option_value for option, option_value in options.items() if option not in KINDS}
    if name == host.name and group == "mixer" and not several and _is_plain(mixer, host.name):
        target = _size(host.name, rest, match)
        subject = "its own feed-forward networks, which"
        line = f"{reference}: {key}.match={match} changes nothing: {reference} keeps {subject}"
        return mixer, f"{line} make {target:,} {_words(match)}"
    widths = _widths(name, group, match, entries, several=several)
    target = _size(host.name, rest, match)

    def mixers_at(ratio: float) -> Any:
        """Return the group's mixers at a point of the search."""
        entries = [
            entryion_value if width is None else {**_options_of(entryion_value), **width.at(ratio)}
            for entryion_value, width in zip(_entries(mixer), widths, strict=True)
        ]
        return entries if several else entries[0]

    def count(ratio: float) -> int | None:
        """Return the network's size at a point of the search; None if a mixer refuses it."""
        try:
            return _size(name, {**options, group: mixers_at(ratio)}, match)
        except ValueError as error:
            refusals.append(str(error))
            return None

    refusals: list[str] = []
    solved = [width for width in widths if width is not None]
    integral = all(isinstance(width.usual, int) for width in solved) and not several
    tried = _search(count, target, (1,) if integral else STEPS)
    if not tried:
        raise ValueError(refusals[0])
    best = min(tried, key=lambda ratio: abs(tried[ratio] - target))
    nearest = ", ".join(
        dict.fromkeys(
            f"{option}={value:g}" + f" of {width.mixer}" * several
            for width in solved
            for option, value in width.at(best).items()
        )
    )
    if abs(tried[best] / target - 1) > TOLERANCE:
        mixers = ", ".join(dict.fromkeys(width.mixer for width in solved))
        raise ValueError(
            f"{key}.match={match}: no {solved[0].option} of {mixers} gives {reference}'s "
            f"{target:,} {_words(match)} to 1 %; the nearest is {nearest} with {tried[best]:,}"
        )
    line = (
        f"{name}: {key}{': ' if several else '.'}{nearest} gives {tried[best]:,} {_words(match)}; "
        f"{reference} has {target:,}"
    )
    return mixers_at(best), line


def _is_plain(mixer: Mapping[str, Any], host: str) -> bool:
    """Return True for options with which a host keeps its own FFN."""
    usual = mixer_options(OWN_FFN, host)
    return all(key in usual and value in (None, usual[key]) for key, value in mixer.items())


def _options_of(entry: Any) -> dict[str, Any]:
    return {"name": entry} if isinstance(entry, str) else dict(entry or {})


def _widths(
    name: str, group: str, match: Match, entries: Sequence[Any], *, several: bool
) -> list[_Width | None]:
    """Return the width of each mixer of a group that is solved; None for the others.

    Raises:
        ValueError: All mixers lack an option for their width, or have it given.
    """
    host, suffix = look_up(name)
    key = f"backbone.{group}.match={match}"
    default_mixer = (
        OWN_FFN if group == "mixer" and host.plain_ffn and "channel" in host.slots else None
    )
    widths: list[_Width | None] = []
    refusals = []
    for entry in entries:
        widths.append(None)
        entry_options = _options_of(entry)
        if entry_options.get("match") is None:
            continue
        mixer_name = entry_options.get("name") or suffix or default_mixer
        if mixer_name is None or find_mixer(mixer_name).kind != KINDS[group]:
            raise ValueError(
                f"{key} needs a {KINDS[group]} mixer's name, because {name} keeps a module of its "
                f"own there; type backbone.{group}.name=<mixer> too"
            )
        valid_options = mixer_options(mixer_name, host.name)
        option = next((candidate for candidate in WIDTHS if candidate in valid_options), None)
        if option is None:
            refusals.append(
                f"{mixer_name} has no option for its width, which {key} would solve; it has "
                f"{', '.join(valid_options) or 'none'}"
            )
        elif entry_options.get(option) not in (None, valid_options[option]):
            refusals.append(
                f"{key} solves {option}, which is {entry_options[option]} already; "
                "leave one of them out"
            )
        else:
            widths[-1] = _Width(
                mixer_name, option, _usual(mixer_name, option, valid_options[option], several)
            )
    if not any(widths):
        raise ValueError(refusals[0])
    return widths


def _usual(mixer: str, option: str, default: float | None, several: bool) -> float:
    """Return the width of a mixer at ``USUAL``; alone, it is what the search goes through."""
    if not several:
        return int(USUAL) if isinstance(default, int) else USUAL
    if default is None:
        return USUAL * find_mixer(mixer).hidden_scale if option == "hidden_ratio" else 1.0
    return default


def _search(
    count: Callable[[float], int | None], target: int, steps: Sequence[float]
) -> dict[float, int]:
    """Return tried widths with their counts, of which one is near the target if any can be.

    Counts grow almost linearly with the width: a line through two of them leads near the target.
    """
    counts: dict[float, int] = {}

    def add(width: float) -> bool:
        """Count a new width; False if it is known or refused."""
        size = None if width in counts else count(width)
        if size is not None:
            counts[width] = size
        return size is not None

    for start in STARTS:
        add(start)
        if len(counts) == 2:
            break
    for _ in range(ROUNDS):
        pairs = sorted(counts.items(), key=lambda item: abs(item[1] - target))[:2]
        if len({size for _, size in pairs}) < 2 or abs(pairs[0][1] / target - 1) <= CLOSE:
            break
        (x0, y0), (x1, y1) = pairs
        guess = x0 + (target - y0) * (x1 - x0) / (y1 - y0)
        any(add(round(round(max(guess, step) / step) * step, 4)) for step in steps)
    return counts


def _size(name: str, options: Mapping[str, Any], match: Match) -> int:
    """Return the parameters or multiply-adds of a network without weights."""
    build_options = {**options, "pretrained": None, "fast": False}
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        backbone = create_backbone(name, **build_options)
    if match == "params":
        return count_parameters(backbone)
    return count_macs(_Embedding(backbone), shape=_input_shape(backbone))


class _Embedding(torch.nn.Module):
    """The embedding of a network, so that its last norm and pooling are counted."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.backbone.embed(x) if not self.backbone.dense else self.backbone(x)[-1]


def _input_shape(backbone: Backbone) -> tuple[int, ...]:
    """Return the shape of an input of the build resolution, without its batch."""
    options = backbone.record["options"]
    height, width = backbone.img_size
    shapes: dict[str, tuple[int, ...]] = {
        "image": (backbone.in_chans, height, width),
        "low_resolution_image": (backbone.in_chans, height, width),
        "noisy_image": (options.get("channels", backbone.in_chans), height, width),
        "series": (width, options.get("variables", SERIES_VARIABLES)),
        "text": (width,),
        "point_cloud": (POINTS, 3 + options.get("channels", 0)),
    }
    if backbone.modality not in shapes:
        raise ValueError(
            f"match=macs has no input to count {backbone.name} on, which takes "
            f"{backbone.modality}; pass match=params"
        )
    return shapes[backbone.modality]


def _words(match: Match) -> str:
    return "parameters" if match == "params" else "multiply-adds"
