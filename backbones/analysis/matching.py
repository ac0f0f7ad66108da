"""Mixers of equal size: the width with which a network has the plain host's parameters or FLOPs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from backbones.analysis.counting import count_macs, count_parameters
from backbones.base import Backbone
from backbones.factory import create_backbone, mixer_options
from backbones.options import check_value, mixer_names
from backbones.registry import OWN_FFN, find_mixer, look_up

logger = logging.getLogger(__name__)

Match = Literal["params", "macs"]
KINDS = {"mixer": "channel", "token_mixer": "token"}
# A mixer's option of its size, the first that it has.
WIDTHS = ("hidden_ratio", "expansion", "rank_ratio", "rank", "ratio")
TOLERANCE = 0.01  # of the plain host's count
CLOSE = TOLERANCE / 4  # ends the search
ROUNDS = 3
STARTS = (4, 2, 1, 0.5, 0.25, 8, 16, 32, 3, 6)
# Ratios with fine and with coarse steps: groups may have to divide the hidden width.
STEPS = (1e-4, 1 / 48, 1 / 24, 1 / 16, 1 / 8, 1 / 6, 1 / 4, 1 / 3, 1 / 2)


def solve_match(
    name: str, *, report: Callable[[str], object] = logger.info, **options: Any
) -> dict[str, Any]:
    """Return options of ``create_backbone`` with the width of a mixer solved for equal size.

    ``mixer={"match": "params"}`` asks for the parameters of the plain host to 1 %, "macs" for its
    multiply-adds at the build resolution. ``token_mixer`` takes ``match`` as well. Options without
    ``match`` are returned as they are.

    Args:
        name: One of ``list_backbones()``.
        report: Gets a line on each solved width; by default it is logged.
        **options: Of ``create_backbone``.

    Raises:
        ValueError: The mixer has no option for its width, its width is given too, or no width gives
            the plain host's size to 1 %.

    >>> options = solve_match("deit_t_glu", mixer={"match": "params"}, img_size=64)
    >>> round(options["mixer"]["hidden_ratio"], 2)
    2.66
    """
    asked: dict[str, Match] = {}
    for group in KINDS:
        given = options.get(group)
        if isinstance(given, Mapping) and "match" in given:
            match = given["match"]
            check_value(f"backbone.{group}.match", match, Match | None)
            asked |= {group: match} if match is not None else {}
            rest = {key: value for key, value in given.items() if key != "match"}
            options = {**options, group: rest}
    if len(asked) > 1:
        raise ValueError(f"match solves one width; give it to one of {' and '.join(asked)}")
    for group, match in asked.items():
        width, line = _solve(name, options, group, match)
        report(line)
        options = {**options, group: {**options[group], **width}}
    return options


def _solve(
    name: str, options: Mapping[str, Any], group: str, match: Match
) -> tuple[dict[str, float], str]:
    """Return the option of a mixer's width, and a line on it."""
    host, suffix = look_up(name)
    mixer = options[group]
    own = OWN_FFN if group == "mixer" and host.plain_ffn and "channel" in host.slots else None
    named = next(iter(mixer_names(mixer)), suffix or own)
    if named is None or find_mixer(named).kind != KINDS[group]:
        raise ValueError(f"backbone.{group}.match={match} needs a {KINDS[group]} mixer's name")
    known = mixer_options(named, host.name)
    width = next((one for one in WIDTHS if one in known), None)
    if width is None:
        raise ValueError(
            f"{named} has no option for its width, which backbone.{group}.match={match} would "
            f"solve; it has {', '.join(known) or 'none'}"
        )
    if mixer.get(width) not in (None, known[width]):
        raise ValueError(
            f"backbone.{group}.match={match} solves {width}, which is {mixer[width]} already; "
            "leave one of them out"
        )
    rest = {key: value for key, value in options.items() if key not in ("mixer", "token_mixer")}
    target = _size(host.name, rest, match)
    plain = options.get("model", host.name)  # a network of timm has its own name

    def count(value: float) -> int | None:
        """Return the network's size at a width; None if the mixer refuses it."""
        try:
            return _size(name, {**options, group: {**mixer, width: value}}, match)
        except ValueError as error:
            refusals.append(str(error))
            return None

    refusals: list[str] = []
    tried = _search(count, target, (1,) if isinstance(known[width], int) else STEPS)
    if not tried:
        raise ValueError(refusals[0])
    best = min(tried, key=lambda value: abs(tried[value] - target))
    if abs(tried[best] / target - 1) > TOLERANCE:
        raise ValueError(
            f"backbone.{group}.match={match}: no {width} of {named} gives {plain}'s "
            f"{target:,} {_words(match)} to 1 %; the nearest is {width}={best} with {tried[best]:,}"
        )
    line = (
        f"{name}: backbone.{group}.{width}={best} gives {tried[best]:,} {_words(match)}; "
        f"{plain} has {target:,}"
    )
    return {width: best}, line


def _search(
    count: Callable[[float], int | None], target: int, steps: Sequence[float]
) -> dict[float, int]:
    """Return tried widths with their counts, of which one is near the target if any can be.

    Counts grow almost linearly with the width: a line through two of them leads near the target.
    """
    known: dict[float, int] = {}

    def add(width: float) -> bool:
        """Count a new width; False if it is known or refused."""
        found = None if width in known else count(width)
        if found is not None:
            known[width] = found
        return found is not None

    for start in STARTS:
        add(start)
        if len(known) == 2:
            break
    for _ in range(ROUNDS):
        pairs = sorted(known.items(), key=lambda item: abs(item[1] - target))[:2]
        if len({size for _, size in pairs}) < 2 or abs(pairs[0][1] / target - 1) <= CLOSE:
            break
        (x0, y0), (x1, y1) = pairs
        guess = x0 + (target - y0) * (x1 - x0) / (y1 - y0)
        any(add(round(round(max(guess, step) / step) * step, 4)) for step in steps)
    return known


def _size(name: str, options: Mapping[str, Any], match: Match) -> int:
    """Return the parameters or multiply-adds of a network without weights."""
    shown = {**options, "pretrained": None, "fast": False}
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        backbone = create_backbone(name, **shown)
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
    if backbone.modality != "image":
        raise ValueError(
            f"match=macs counts images, and {backbone.name} takes another modality; pass "
            "match=params"
        )
    return (backbone.in_chans, *backbone.img_size)


def _words(match: Match) -> str:
    return "parameters" if match == "params" else "multiply-adds"
