"""Mixers as users type them: a name, options, or a list with one entry per stage or block."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from backbones.mixer import Mixer, PointwiseMixer
from backbones.options import listed
from backbones.registry import OWN_FFN, HostEntry, Kind, find_host, find_mixer, list_mixers
from backbones.slots import HostConfig, MixerFactory, Slot, SlotMixers

GROUPS: dict[Kind, str] = {"channel": "mixer", "token": "token_mixer"}
Typed = Mapping[str, Any] | str | Sequence[Any] | None


@dataclass(frozen=True)
class Choice:
    """One mixer of a network.

    Attributes:
        name: Its registered name; None keeps the host's own module.
        options: Its own, as they are typed.
    """

    name: str | None
    options: Mapping[str, Any] = field(default_factory=dict)


def read_choices(
    kind: Kind, choices: Typed, usual_mixer: str | None, host: str
) -> Choice | tuple[Choice, ...]:
    """Return the mixers that ``mixer=`` or ``token_mixer=`` names, one or one per stage or block.

    Args:
        kind: Of the slots.
        choices: A name, options with "name", or a list of these, where None keeps the host's own.
        usual_mixer: Mixer of this kind in the backbone's name.
        host: The host's name, for messages.

    Raises:
        ValueError: A name is missing or unknown, or the backbone's name has another mixer.
    """
    if isinstance(choices, Sequence) and not isinstance(choices, str):
        if usual_mixer is not None:
            raise ValueError(
                f"{host}_{usual_mixer} already has {usual_mixer} as {kind} mixer; type "
                f"backbone={host} to use a list of {kind} mixers"
            )
        if not choices:
            raise ValueError(f"backbone.{GROUPS[kind]} is an empty list; name a mixer per stage")
        return tuple(_read_one(kind, item, None, host) for item in choices)
    return _read_one(kind, choices, usual_mixer, host)


def names_of(choices: Choice | tuple[Choice, ...]) -> list[str | None]:
    """Return the names of chosen mixers, each once."""
    several = choices if isinstance(choices, tuple) else (choices,)
    return list(dict.fromkeys(choice.name for choice in several))


def _read_one(kind: Kind, choice: Any, usual_mixer: str | None, host: str) -> Choice:
    if choice is not None and not isinstance(choice, str | Mapping):
        raise ValueError(
            f"backbone.{GROUPS[kind]} takes names, options such as {{name: afbo, g2: 6}} and null "
            f"for the host's own; got {choice!r}"
        )
    options = {"name": choice} if isinstance(choice, str) else dict(choice or {})
    if options.pop("match", None) is not None:
        raise ValueError(
            f"backbone.{GROUPS[kind]}.match is solved before a network is built, for one mixer in "
            "all blocks: pass the options through backbones.analysis.matching.solve_match"
        )
    name = options.pop("name", None)
    if kind == "token" and name is not None and not options:
        if name == find_host(host).own_token_mixer:
            return Choice(None)
    if name is not None and usual_mixer is not None and name != usual_mixer:
        raise ValueError(
            f"{host}_{usual_mixer} already has {usual_mixer} as {kind} mixer; type "
            f"backbone={host} to use {name} instead"
        )
    name = usual_mixer if name is None else find_mixer(name, kind).name
    if name is None and kind == "token" and (options or choice is not None):
        raise ValueError(
            f"token_mixer needs a name, one of {listed(list_mixers('token'))}; got {options}"
        )
    return Choice(name, options)


def spread(
    factories: Sequence[MixerFactory | None], kind: Kind, host: HostEntry, config: HostConfig,
    options: Mapping[str, Any],
) -> SlotMixers:  # fmt: skip
    """Return the factory of mixers that differ from stage to stage, or from block to block.

    Args:
        factories: One per stage or per block; None keeps the host's own.
        kind: Of the slots.
        host: The host.
        config: Its config.
        options: Its own options.

    Raises:
        ValueError: The number of entries differs from those of stages and of blocks.
    """
    places = _places(kind, host, config, options)
    stages = sorted({stage for stage, _ in places})
    if len(factories) == len(stages) > 1 or len(factories) == 1:
        factory_of_stage = dict(zip(stages, itertools.cycle(factories), strict=False))
        return SlotMixers({(stage, block): factory_of_stage[stage] for stage, block in places})
    if len(factories) == len(places):
        return SlotMixers(dict(zip(places, factories, strict=True)))
    depths = [str(sum(place[0] == stage for place in places)) for stage in stages]
    owner = options.get("model", host.name)
    if len(stages) == 1:
        shape, advice = f"{len(places)} blocks", f"{len(places)}, one per block"
    else:
        shape = f"{len(stages)} stages of {', '.join(depths)} blocks"
        advice = f"{len(stages)} entries, one per stage"
        advice += f", or {len(places)}, one per block" * (len(places) > len(stages))
    raise ValueError(
        f"backbone.{GROUPS[kind]} has {len(factories)} entries, but {owner} has {shape}; give "
        f"{advice}"
    )


def _places(
    kind: Kind, host: HostEntry, config: HostConfig, options: Mapping[str, Any]
) -> list[tuple[int, int]]:
    """Return stage and block of each block with slots of a kind, in order of depth.

    Blocks behind the last map that see class tokens alone, as a map of one token (LVT), are left
    out; they follow the last stage. In hosts of points every slot is such a map.
    """
    grids: dict[tuple[int, int], tuple[int, int]] = {}

    def note(slot: Slot) -> Mixer:
        grids[slot.stage, slot.block] = slot.grid
        mixer = _Placeholder()
        mixer.kind = kind
        return mixer

    mixers: dict[str, Any] = {"channel_mixer": None, "token_mixer": None, f"{kind}_mixer": note}
    bare = replace(config, pretrained=False, **mixers)
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        stages = len(host.build(bare, **options).feature_info)
    if set(grids.values()) == {(1, 1)}:
        return list(grids)
    return [place for place, grid in grids.items() if grid != (1, 1) or place[0] < stages]


class _Placeholder(PointwiseMixer):
    """Identity in a network that is built to count its blocks.

    Its parameter is on the meta device, which tells hosts that mixers cannot be tried there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.empty(0))

    def mix(self, x: Tensor) -> Tensor:
        """Return the input."""
        return x


def resolve(choice: Choice, kind: Kind, host: HostEntry) -> str | None:
    """Return the mixer that a choice builds; None if the host keeps its own."""
    if choice.name is not None or kind == "token":
        return choice.name
    return OWN_FFN if host.plain_ffn and "channel" in host.slots else None
