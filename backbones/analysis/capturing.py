"""Recording of the maps of blocks and the coefficients of mixers.

Axes: B images, C channels, (h, w) the map of a block, P prefix tokens, M hidden channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from backbones.base import Backbone
from backbones.mixer import class_name
from backbones.options import unknown

Size = tuple[int, int]


@dataclass
class Call:
    """Inputs and output of one call of a module."""

    inputs: tuple[Any, ...]
    output: Any


@contextmanager
def watch(network: nn.Module, names: Sequence[str]) -> Iterator[dict[str, list[Call]]]:
    """Record the calls of the named modules, in order, inside the context."""
    calls: dict[str, list[Call]] = {name: [] for name in names}
    with ExitStack() as stack:
        for name in names:

            def keep(
                module: nn.Module, inputs: tuple[Any, ...], output: Any, name: str = name
            ) -> None:
                calls[name].append(Call(inputs, output))

            stack.enter_context(network.get_submodule(name).register_forward_hook(keep))
        yield calls


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Set evaluation mode inside the context, and restore the mode of each part afterwards."""
    training = [module for module in network.modules() if module.training]
    network.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def choose_blocks(backbone: Backbone, blocks: Sequence[str] | None) -> tuple[str, ...]:
    """Return names of blocks, all by default.

    A block is chosen by its name (``layers.3.blocks.1``) or its number by depth, from 1; -1 is the
    last.

    Raises:
        ValueError: Unknown block.
    """
    names = backbone.block_names()
    if blocks is None:
        return names
    selection = []
    for block in blocks:
        if block.removeprefix("-").isdecimal():
            number = int(block)
            if 0 < abs(number) <= len(names):
                block = names[number - 1 if number > 0 else number]
        if block not in names:
            raise ValueError(
                f"{backbone.name} has blocks 1 to {len(names)}, -1 is the last; "
                + unknown("block", block, list(names))
            )
        selection.append(block)
    return tuple(selection)


@torch.no_grad()
def block_maps(
    backbone: Backbone, images: Tensor, blocks: Sequence[str] | None = None
) -> dict[str, Tensor]:
    """Return the outputs of blocks in evaluation mode as maps (B, C, h, w).

    Args:
        backbone: Backbone of any host.
        images: (B, 3, H, W).
        blocks: See ``choose_blocks``.
    """
    names = choose_blocks(backbone, blocks)
    with evaluating(backbone), watch(backbone, names) as calls:
        backbone(images)
    return {
        name: backbone.block_map(call[0].output, *call[0].inputs) for name, call in calls.items()
    }


def value_layer(mixer: nn.Module) -> str | None:
    """Return the name of the layer that reads a mixer's coefficients; None without one.

    Mixers declare it; timm's feed-forward networks all call it fc2.
    """
    modules = dict(mixer.named_modules())
    for prefix, module in modules.items():
        layer = getattr(module, "value_layer", "") or "fc2"
        name = f"{prefix}.{layer}" if prefix else layer
        if name in modules:
            return name
    return None


def coefficients(
    backbone: Backbone, images: Tensor, mixers: Sequence[str] | None = None
) -> dict[str, Tensor]:
    """Return the coefficients of mixers, c = GELU(W1 x) of an FFN, as maps (B, M, h, w).

    Args:
        backbone: Backbone of any host.
        images: (B, 3, H, W).
        mixers: Names of token and channel mixers; by default all with coefficients on the map.

    Raises:
        ValueError: A mixer lacks coefficients.

    Source: FFNet (https://arxiv.org/abs/2406.02021), Sec. 2 and Eq. 4.
    """
    mixers_of = backbone.token_mixers() | backbone.channel_mixers()
    layers = {name: value_layer(module) for name, module in mixers_of.items()}
    if mixers is None:
        mixers = [name for name, layer in layers.items() if layer is not None]
    for name in mixers:
        if name not in mixers_of:
            raise ValueError(unknown(f"mixer of {backbone.name}", name, list(mixers_of)))
        if layers[name] is None:
            raise ValueError(
                f"{name} of {backbone.name} ({class_name(mixers_of[name])}) lacks coefficients; "
                "choose an FFN or another mixer with two layers"
            )
    places = {name: f"{name}.{layers[name]}" for name in mixers}
    blocks = {name: _block_of(backbone, name) for name in mixers}
    # Mixers merge their layers if autograd is off.
    trained = [p for p in backbone.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        with evaluating(backbone), torch.enable_grad():
            with watch(backbone, [*places.values(), *set(blocks.values())]) as calls:
                backbone(images)
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
    tensors = {}
    for name, place in places.items():
        call = calls[blocks[name]][0]
        size = backbone.block_map(call.output, *call.inputs).shape[2:]
        layer = backbone.get_submodule(place)
        map_ = _as_map(layer, calls[place], (size[0], size[1]), backbone)
        if map_ is not None:
            tensors[name] = map_
    return tensors


def _block_of(backbone: Backbone, mixer: str) -> str:
    return next(block for block in backbone.block_names() if mixer.startswith(f"{block}."))


def _as_map(layer: nn.Module, calls: list[Call], size: Size, backbone: Backbone) -> Tensor | None:
    """Return a layer's input as (B, M, h, w); None if it is not a map of this size."""
    if not calls:
        return None
    x: Tensor = calls[0].inputs[0]
    gathered = backbone.gathered(x)
    if gathered is not None:
        return gathered
    if x.ndim == 3:
        if x.shape[1] == backbone.num_prefix_tokens + size[0] * size[1]:
            x = x[:, backbone.num_prefix_tokens :]
        if x.shape[1] != size[0] * size[1]:
            return None
        return x.unflatten(1, size).permute(0, 3, 1, 2)
    if x.ndim != 4:
        return None
    x = x if isinstance(layer, nn.Conv2d) or _reads_channels_first(layer) else x.permute(0, 3, 1, 2)
    return x if tuple(x.shape[2:]) == size else None


def _reads_channels_first(layer: nn.Module) -> bool:
    """Return True if a layer consists of convolutions, as FFNet's with branches."""
    parts = [m for m in layer.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    return bool(parts) and all(isinstance(part, nn.Conv2d) for part in parts)
