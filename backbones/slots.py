"""Slots: the places in a host that mixers fill, and the options that hosts are built with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from backbones.mixer import Mixer, class_name, no_prefix, takes_prefix
from backbones.replace import replace


@dataclass(frozen=True)
class Slot:
    """Place in a host that a mixer fills, with all that determines the mixer's size.

    Attributes:
        dim: Channels C.
        hidden_ratio: Hidden width of the host's own FFN over C.
        grid: Map size (H, W) at the build resolution.
        stage: Stage index, from 0.
        block: Block index within the stage, from 0.
        dense: True if the host is built for dense prediction.
        num_prefix_tokens: Number P of class tokens.
    """

    dim: int
    hidden_ratio: float
    grid: tuple[int, int]
    stage: int
    block: int
    dense: bool
    num_prefix_tokens: int = 0


MixerFactory = Callable[[Slot], Mixer]


class SlotMixers:
    """Factory of mixers that differ from stage to stage or from block to block.

    Args:
        by_place: Factory per stage and block; None keeps the host's own module. Later stages, such
            as class blocks, take the last one.
    """

    def __init__(self, by_place: Mapping[tuple[int, int], MixerFactory | None]) -> None:
        self.by_place = dict(by_place)

    def at(self, slot: Slot) -> MixerFactory | None:
        """Return the factory of a slot; None if the host keeps its own module there."""
        last = next(reversed(self.by_place.values()))
        return self.by_place.get((slot.stage, slot.block), last)

    def __call__(self, slot: Slot) -> Mixer:
        """Build the mixer of a slot.

        Raises:
            ValueError: The host keeps its own module there.
        """
        factory = self.at(slot)
        if factory is None:
            raise ValueError(f"stage {slot.stage}, block {slot.block} keeps the host's own module")
        return factory(slot)


def factory_at(factory: MixerFactory | None, slot: Slot) -> MixerFactory | None:
    """Return the factory for one slot; None if the host keeps its own module there."""
    return factory.at(slot) if isinstance(factory, SlotMixers) else factory


def fill(block: nn.Module, name: str, factory: MixerFactory | None, slot: Slot) -> None:
    """Replace a block's FFN or attention by a mixer; without factory the host keeps its own.

    The block records the place in either case, see ``Backbone.channel_places``.
    A host fills its slots after all of its own weights are drawn, so that mixers leave them alike.

    Raises:
        ValueError: The host has class tokens that the mixer refuses.
    """
    cast("Any", block).filled = (*getattr(block, "filled", ()), name)
    factory = factory_at(factory, slot)
    if factory is None:
        return
    mixer = factory(slot)
    if slot.num_prefix_tokens and not takes_prefix(type(mixer), mixer.kind):
        raise ValueError(no_prefix(class_name(mixer)))
    module = block.get_submodule(name)
    mixer.replaced = {key: value.shape for key, value in module.state_dict().items()}
    mixer.is_related = type(module) is type(mixer)
    replace(block, name, mixer)


@dataclass(frozen=True)
class HostConfig:
    """Options that every host builder gets.

    Attributes:
        img_size: Build resolution (H, W), (1, L) for signals; other sizes run too.
        drop_path_rate: Stochastic depth of the last block, rising linearly from 0.
        pretrained: True to load timm's published weights (needs network once).
        dense: Build for dense prediction (see ``create_backbone``).
        patch_size: Stride of the first map.
        channel_mixer: Builds the mixer that replaces an FFN; None keeps the host's own.
        token_mixer: Builds the mixer that replaces attention or pooling; None keeps the host's own.
        in_chans: Channels of the images.
    """

    img_size: tuple[int, int]
    drop_path_rate: float = 0.0
    pretrained: bool = False
    dense: bool = False
    patch_size: int = 4
    channel_mixer: MixerFactory | None = None
    token_mixer: MixerFactory | None = None
    in_chans: int = 3

    def grid(self, stride: int) -> tuple[int, int]:
        """Return the size (H, W) of the map with this stride at the build resolution."""
        height, width = self.img_size
        return -(-height // stride), -(-width // stride)


def hidden_width(dim: int, ratio: float) -> int:
    """Return ``ratio`` times ``dim`` hidden channels, rounded down: 256 for 8/3 of 96.

    Raises:
        ValueError: The result is zero.
    """
    hidden = int(dim * ratio + 1e-6)
    if hidden < 1:
        raise ValueError(
            f"hidden_ratio must give at least one hidden channel for {dim} channels, got {ratio}"
        )
    return hidden
