"""Recognition of feed-forward networks and token mixers by what a network's blocks call.

A slot is a module that a block calls once, on its map, and that returns a map of the same shape:

* A feed-forward network has two or more pointwise layers, from C channels to wider ones and back,
  and reads each place alone, but for depthwise and grouped convolutions between the layers.
* A token mixer combines places: attention, a recurrence, linear layers over tokens, a pooling, or
  depthwise convolutions alone. Where a block has both attention and others, attention counts.

Positional encodings, gates (which multiply their input), class attention and branches of several
token sequences keep their own modules.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from backbones.hosts.timm_model.layouts import (
    ChannelsFirst,
    Frame,
    Layout,
    PatchPositions,
    Permuted,
    Place,
    Size,
    TokenSequence,
    TransposedTokens,
    Windows,
)
from backbones.hosts.timm_model.probing import BATCH, COMBINING, POOLING, Layer, ModuleCall

Kind = Literal["channel", "token"]
# "either" is an FFN with depthwise convolutions, as some token mixers are; "weak" counts as a token
# mixer if its block lacks another.
Sort = Literal["channel", "token", "either", "weak"]
POSITIONS = re.compile(r"(^|\.)(\w*pos_\w*|\w*cpe\d*|crpe\d*|\w*pos)(\.|$)")
OUTSIDE = re.compile(r"(^|\.)(stem\w*|patch_embed)\.")
DOWNSAMPLING = re.compile(r"(^|\.)(downsample|global_block)\.")
ATTENDING = "softmax"
PARTIAL = ("Partial_conv3",)  # a convolution of some channels, which leaves the others alone
# Modules that add their input themselves; the mixer in their place gets the same shortcut.
WITH_SHORTCUT = ("RepMixer", "RepVggDw")
# Methods in which a block cuts its map into windows around its attention.
WINDOWED = {
    "SwinTransformerBlock": "_attn",
    "SwinTransformerV2Block": "_attn",
    "SwinTransformerV2CrBlock": "_shifted_window_attn",
    "GlobalContextVitBlock": "_window_attn",
    "PartitionAttentionCl": "_partition_attn",
    "PartitionAttention2d": "_partition_attn",
}
SEVERAL_BRANCHES = ("CrossVit",)


@dataclass(frozen=True, eq=False)
class Found:
    """A module that a mixer may replace.

    Attributes:
        name: Its name in the network.
        block: Name of its block.
        kind: "channel" or "token".
        dim: Channels C.
        hidden_ratio: Hidden width over C of a feed-forward network, 4 for token mixers.
        layout: Layout of its input.
        shortcut: True if it adds its own input.
        method: Method of its parent that calls it on windows, replaced by a plain call; or empty.
    """

    name: str
    block: str
    kind: Kind
    dim: int
    hidden_ratio: float
    layout: Layout
    shortcut: bool = False
    method: str = ""


@dataclass(frozen=True, eq=False)
class Slots:
    """The slots of a network, and the reasons why other candidates keep their own module.

    Attributes:
        places: The slots.
        reasons: Reasons by the name of a candidate.
        names_alike: Names of the modules of each kind with class and last name of a slot's module.
    """

    places: tuple[Found, ...]
    reasons: Mapping[str, str]
    names_alike: Mapping[Kind, tuple[str, ...]] = field(default_factory=dict)

    def of(self, kind: Kind) -> list[Found]:
        """Return the slots of a kind, in order of depth."""
        return [slot for slot in self.places if slot.kind == kind]


@dataclass(frozen=True)
class _Candidate:
    call: ModuleCall
    module: nn.Module
    kind: Sort
    block: str
    around: ModuleCall  # the module that adds its input to what the candidate returns


def find_slots(
    network: nn.Module, calls: Mapping[str, list[ModuleCall]], size: Size, frame: Frame
) -> Slots:
    """Return the slots of a network from the calls of its modules.

    Args:
        network: On any device.
        calls: By module, from ``probing.record_calls``.
        size: Size (H, W) of the images of those calls.
        frame: Becomes that of the slots' layouts.
    """
    if type(network).__name__ in SEVERAL_BRANCHES:
        return Slots((), {"blocks": "its branches have tokens of different sizes"})
    modules = dict(network.named_modules())
    reasons_of_kept: dict[str, str] = {}
    candidates: list[_Candidate] = []
    for name, calls_of_module in calls.items():
        if any(name.startswith(f"{candidate.call.name}.") for candidate in candidates):
            continue
        around = _around(name, calls)
        kind = (
            None
            if around is None
            else _kind(name, modules[name], calls_of_module[0], around, calls)
        )
        if around is None or kind is None:
            continue
        if len(calls_of_module) > 1:
            reasons_of_kept[name] = f"it is called {len(calls_of_module)} times in a pass"
            continue
        candidates.append(_Candidate(calls_of_module[0], modules[name], kind, _block(name), around))
    slots_found = []
    for candidate, settled in _settled(candidates, reasons_of_kept):
        slot = _slot(candidate, settled, network, modules, calls, size, frame)
        if isinstance(slot, str):
            reasons_of_kept[candidate.call.name] = slot
        else:
            slots_found.append(slot)
    reasons = reasons_of_kept | _kept_mixers(
        [candidate.name for candidate in slots_found], reasons_of_kept, calls
    )
    kinds: tuple[Kind, ...] = ("channel", "token")
    return Slots(
        tuple(slots_found),
        reasons,
        {kind: _names_alike(kind, slots_found, modules) for kind in kinds},
    )


def _names_alike(
    kind: Kind, slots: Sequence[Found], modules: Mapping[str, nn.Module]
) -> tuple[str, ...]:
    """Return the names of all modules like those in a kind's slots, the slots among them."""

    def traits(name: str) -> tuple[object, ...]:
        module = modules[name]
        is_depthwise = isinstance(module, nn.Conv2d) and module.groups == module.in_channels > 1
        return name.rpartition(".")[2], type(module), is_depthwise

    traits_of_kind = {traits(slot.name) for slot in slots if slot.kind == kind}
    names_of_others = {slot.name for slot in slots if slot.kind != kind}
    return tuple(
        name for name in modules if name not in names_of_others and traits(name) in traits_of_kind
    )


def _around(name: str, calls: Mapping[str, list[ModuleCall]]) -> ModuleCall | None:
    """Return the call of the block around a module: with a shortcut, or in a list of blocks."""
    parts = name.split(".")
    if not any(part.isdigit() for part in parts[:-1]) or OUTSIDE.search(name):
        return None
    above = [".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1)]
    calls_above = [calls[parent][0] for parent in above if parent in calls]
    around = next((call for call in calls_above if call.adds_input), None)
    if around is None:
        around = next(
            (call for call in calls_above if call.name.rpartition(".")[2].isdigit()), None
        )
    inside = calls_above[: calls_above.index(around)] if around is not None else calls_above
    return None if any(call.scales_input for call in inside) else around


def _kind(
    name: str,
    module: nn.Module,
    call: ModuleCall,
    around: ModuleCall,
    calls: Mapping[str, list[ModuleCall]],
) -> Sort | None:
    """Return what a module is by its calls of torch; None if a mixer cannot replace it."""
    keeps_shape = call.returned == call.input_shape and len(call.input_shape) > 2
    if not keeps_shape or POSITIONS.search(name) or name.rpartition(".")[2].isdigit():
        return None
    if type(module).__name__ in WITH_SHORTCUT:
        return "weak"
    if call.adds_input or call.scales_input:
        return None
    if _is_transposed(call, around):
        return "token" if call.layers else None
    if isinstance(module, nn.Linear):
        return None
    if _combines_places(module, call):
        is_recurrent = any(isinstance(part, nn.RNNBase) for part in module.modules())
        return "token" if call.layers or is_recurrent else None
    if call.functions & POOLING:
        return "weak" if not call.layers else None
    if type(module).__name__ in PARTIAL:
        return "weak"
    return _kind_of_layers(name, call, around, calls)


def _combines_places(module: nn.Module, call: ModuleCall) -> bool:
    """Return True for attention, a recurrence, or linear layers over tokens."""
    if call.functions & COMBINING or any(_mixes_tokens(layer, call) for layer in call.layers):
        return any(layer.is_pointwise for layer in call.layers)
    attends = ATTENDING in call.functions and all(layer.is_pointwise for layer in call.layers)
    return attends or any(isinstance(part, nn.RNNBase) for part in module.modules())


def _kind_of_layers(
    name: str, call: ModuleCall, around: ModuleCall, calls: Mapping[str, list[ModuleCall]]
) -> Sort | None:
    """Return the kind of a module of pointwise layers and convolutions."""
    pointwise = [layer for layer in call.layers if layer.is_pointwise]
    spatial = [layer for layer in call.layers if not layer.is_pointwise]
    if call.functions & COMBINING or any(
        layer_.groups == 1 or layer_.stride > 1 for layer_ in spatial
    ):
        return None
    if len(pointwise) > 1:
        first, last = pointwise[0], pointwise[-1]
        if first.inputs != last.outputs or first.inputs not in call.input_shape[1:]:
            return None
        if not any(layer.is_depthwise for layer in spatial):
            return "channel" if last.inputs >= first.inputs else None
        return "either" if last.inputs > first.inputs else "weak"
    if not spatial or not around.adds_input or not _comes_first(name, call, around, calls):
        return None
    return "weak" if not pointwise or call.layers[-1].is_pointwise else None


def _is_transposed(call: ModuleCall, around: ModuleCall) -> bool:
    """Return True if a module reads (B, C, N) within a block of tokens (B, N, C)."""
    if (
        len(call.input_shape) != 3
        or len(around.input_shape) != 3
        or call.input_shape[1] == call.input_shape[2]
    ):
        return False
    return call.input_shape[1:] == around.input_shape[:0:-1]


def _mixes_tokens(layer: Layer, call: ModuleCall) -> bool:
    """Return True for a linear layer over the last axis of tokens that were transposed."""
    if not layer.is_linear or len(call.input_shape) != 3 or len(layer.shape) != 3:
        return False
    tokens = call.input_shape[1]
    return layer.shape[2] == tokens != layer.shape[1]


def _comes_first(
    name: str, call: ModuleCall, around: ModuleCall, calls: Mapping[str, list[ModuleCall]]
) -> bool:
    """Return True for the first layer of a block that lies outside of other token mixers."""
    above = name.removeprefix(f"{around.name}.").split(".")[:-1]
    parents = [".".join([around.name, *above[:end]]) for end in range(1, len(above) + 1)]
    if any(calls[parent][0].functions & COMBINING for parent in parents if parent in calls):
        return False
    return around.layers[0] is call.layers[0]


def _block(name: str) -> str:
    """Return the entry of a list of modules in which a module lies."""
    parts = name.split(".")[:-1]
    while parts and not parts[-1].isdigit():
        parts.pop()
    return ".".join(parts)


def _settled(
    candidates: list[_Candidate], reasons: dict[str, str]
) -> list[tuple[_Candidate, Kind]]:
    """Decide what conv FFNs are, and which of several token mixers of a block counts."""
    blocks: dict[str, list[_Candidate]] = {}
    for candidate in candidates:
        blocks.setdefault(candidate.block, []).append(candidate)
    settled: list[tuple[_Candidate, Kind]] = []
    for members in blocks.values():
        channel = [candidate for candidate in members if candidate.kind in ("channel", "either")]
        has_token = any(candidate.kind == "token" for candidate in members)
        weak = [candidate for candidate in members if candidate.kind == "weak"]
        for candidate in members:
            if candidate.kind == "weak":
                if has_token or len(weak) > 1:
                    reasons[candidate.call.name] = "its block has another token mixer"
                elif not channel and not _is_only_convolution(candidate):
                    reasons[candidate.call.name] = (
                        "its block has other convolutions of several places"
                    )
                elif DOWNSAMPLING.search(candidate.call.name):
                    reasons[candidate.call.name] = "it belongs to a downsampling"
                else:
                    settled.append((candidate, "token"))
            elif candidate.kind == "either":
                is_first = candidate is channel[0] and len(channel) > 1
                settled.append(
                    (candidate, "token" if is_first and not has_token | bool(weak) else "channel")
                )
            else:
                settled.append((candidate, "token" if candidate.kind == "token" else "channel"))
    return settled


def _is_only_convolution(candidate: _Candidate) -> bool:
    """Return True if no other layer of the block reads several places."""
    return all(
        layer.is_pointwise or any(layer is layer_of_call for layer_of_call in candidate.call.layers)
        for layer in candidate.around.layers
    ) and not any(layer.is_pointwise for layer in candidate.call.layers)


def _kept_mixers(
    slot_names: list[str], skipped: Mapping[str, str], calls: Mapping[str, list[ModuleCall]]
) -> dict[str, str]:
    """Return attention without a slot, with the reason."""
    reasons: dict[str, str] = {}
    for name, calls_of_module in calls.items():
        call, listed_names = calls_of_module[0], [*slot_names, *skipped, *reasons]
        if any(name == name_ or name.startswith(f"{name_}.") for name_ in listed_names):
            continue
        if any(name_.startswith(f"{name}.") for name_ in slot_names) or call.adds_input:
            continue
        if name.rpartition(".")[2].isdigit():
            continue
        if call.functions & COMBINING and len(call.layers) > 1 and _block(name) in calls:
            if call.returned is None:
                reasons[name] = "it returns several tensors"
            elif call.returned != call.input_shape:
                reasons[name] = f"it turns {call.input_shape} into {call.returned}"
    return reasons


def _slot(
    candidate: _Candidate,
    kind: Kind,
    network: nn.Module,
    modules: Mapping[str, nn.Module],
    calls: Mapping[str, list[ModuleCall]],
    size: Size,
    frame: Frame,
) -> Found | str:
    name = candidate.call.name
    dim = _width(candidate)
    if dim is None:
        return "the channels of its input are not recognised"
    if dim not in (*candidate.around.input_shape[1:], *(candidate.around.returned or (0, dim))[1:]):
        return f"it works on {dim} hidden channels"
    parent = modules[name.rpartition(".")[0]]
    around = next(iter(calls.get(name.rpartition(".")[0], [])), None)
    method = ""
    for cls in type(parent).__mro__:
        if kind == "token" and cls.__name__ in WINDOWED:
            method = WINDOWED[cls.__name__]
    if method:
        assert around is not None
        grid = _grid(around.input_shape, dim, candidate.call, size, network)
        if grid is None:
            return "the size of its block's map is not recognised"
        place = Place(_stride(size, grid), grid, frame)
        layout: Layout | str = (
            ChannelsFirst(place)
            if _is_channels_first(around.input_shape, dim, candidate.call)
            else Layout(place)
        )
    else:
        layout = _layout(candidate, dim, network, modules, around, size, frame)
    if isinstance(layout, str):
        return layout
    ratio = 4.0
    if kind == "channel":
        pointwise = [layer for layer in candidate.call.layers if layer.is_pointwise]
        ratio = pointwise[-1].inputs / dim
    shortcut = type(candidate.module).__name__ in WITH_SHORTCUT
    return Found(name, candidate.block, kind, dim, ratio, layout, shortcut, method)


def _width(candidate: _Candidate) -> int | None:
    """Return the channels C of a candidate's input."""
    input_shape, layers = candidate.call.input_shape, candidate.call.layers
    if _is_transposed(candidate.call, candidate.around):
        return input_shape[1]
    if any(_mixes_tokens(layer, candidate.call) for layer in layers):
        return input_shape[2]
    for layer in (layers[0], layers[-1]) if layers else ():
        for width in (layer.inputs, layer.outputs):
            if width == (input_shape[-1] if layer.is_linear else input_shape[1]):
                return width
    if not layers or not layers[0].is_linear:
        return input_shape[1]  # poolings, and convolutions of parts of the channels
    return next((w for w in (layers[0].inputs, layers[-1].outputs) if w in input_shape[1:]), None)


def _is_channels_first(shape: tuple[int, ...], dim: int, call: ModuleCall) -> bool:
    """Return True for (B, C, h, w); where w is C as well, the first layer decides."""
    if len(shape) != 4 or shape[1] != dim:
        return False
    return shape[-1] != dim or not (call.layers and call.layers[0].is_linear)


def _stride(size: Size, grid: Size) -> int:
    return max(1, round(size[0] / grid[0]))


def _is_grid(grid: Size, size: Size) -> bool:
    """Return True if a size (h, w) has the proportions of the images."""
    height, width = grid
    if height < 2 or width < 2:
        return False
    stride = _stride(size, grid)
    return abs(size[0] / height - size[1] / width) <= 1e-6 * stride or (
        -(-size[0] // stride) == height and -(-size[1] // stride) == width
    )


def _grid(
    shape: tuple[int, ...], dim: int, call: ModuleCall, size: Size, network: nn.Module
) -> Size | None:
    """Return (h, w) of a map of 4 axes, or of tokens without prefix; None if it is neither."""
    if len(shape) == 4 and shape[0] == BATCH:
        grid = shape[2:] if _is_channels_first(shape, dim, call) else shape[1:3]
        return (grid[0], grid[1]) if _is_grid((grid[0], grid[1]), size) else None
    if len(shape) == 3 and shape[0] == BATCH:
        sides = _tokens(shape[1], size, network)
        return sides[0] if sides else None
    return None


def _tokens(count: int, size: Size, network: nn.Module) -> tuple[Size, int] | None:
    """Return the map size (h, w) and the prefix tokens P of a number of tokens."""
    stated = getattr(network, "num_prefix_tokens", None)
    choices = [0, 1, 2] if stated is None else [stated, 0, 1]
    for prefix in dict.fromkeys(choices):
        patches = count - prefix
        if patches < 4:
            continue
        height = round(math.sqrt(patches * size[0] / size[1]))
        for rows in (height, height - 1, height + 1):
            if rows > 1 and patches % rows == 0 and _is_grid((rows, patches // rows), size):
                return (rows, patches // rows), prefix
    return None


def _layout(
    candidate: _Candidate,
    dim: int,
    network: nn.Module,
    modules: Mapping[str, nn.Module],
    around: ModuleCall | None,
    size: Size,
    frame: Frame,
) -> Layout | str:
    """Return the layout of a candidate's input, or the reason why it lacks one."""
    shape = candidate.call.input_shape
    special = _special(candidate, modules, size, frame, network)
    if special is not None:
        return special
    if shape[0] == BATCH and len(shape) == 4:
        grid = _grid(shape, dim, candidate.call, size, network)
        if grid is None:
            return f"its input {shape} is not a map of the image"
        place = Place(_stride(size, grid), grid, frame)
        return (
            ChannelsFirst(place)
            if _is_channels_first(shape, dim, candidate.call)
            else Layout(place)
        )
    if shape[0] == BATCH and len(shape) == 3:
        transposed = shape[1] == dim and shape[2] != dim
        tokens = _tokens(shape[2] if transposed else shape[1], size, network)
        if tokens is None:
            return f"{shape[1]} tokens are not a map of the image"
        grid, prefix = tokens
        place = Place(_stride(size, grid), grid, frame)
        if transposed:
            return "its prefix tokens lie in the map" if prefix else TransposedTokens(place)
        return TokenSequence(place, prefix)
    return _windows(candidate, dim, modules, around, size, frame, network)


def _windows(
    candidate: _Candidate,
    dim: int,
    modules: Mapping[str, nn.Module],
    around: ModuleCall | None,
    size: Size,
    frame: Frame,
    network: nn.Module,
) -> Layout | str:
    """Return the layout of windows that a block cut its map into."""
    shape, wrong = (
        candidate.call.input_shape,
        f"its input {candidate.call.input_shape} is not a map of the image",
    )
    if around is None or shape[0] % BATCH or shape[-1] != dim:
        return wrong
    grid = _grid(around.input_shape, dim, candidate.call, size, network)
    if grid is None:
        return wrong
    places = math.prod(shape[1:-1])
    side = shape[1:3] if len(shape) == 4 else (math.isqrt(places), math.isqrt(places))
    rows, columns = -(-grid[0] // side[0]), -(-grid[1] // side[1])
    if side[0] * side[1] != places or rows * columns * BATCH != shape[0]:
        return wrong
    place = Place(_stride(size, grid), grid, frame)
    return Windows(place, 0, (side[0], side[1]))


def _special(
    candidate: _Candidate,
    modules: Mapping[str, nn.Module],
    size: Size,
    frame: Frame,
    network: Any,
) -> Layout | str | None:
    """Return the layout of tokens in an order that only the network knows."""
    shape, name = candidate.call.input_shape, candidate.call.name
    above = [modules[".".join(name.split(".")[:i])] for i in range(name.count(".") + 1)]
    kinds = [type(module).__name__ for module in above]
    if "Hiera" in kinds or type(network).__name__ == "Hiera":
        return _unrolled(candidate, size, frame, network)
    for module, kind in zip(above, kinds, strict=True):
        part: Any = module
        if kind == "NestLevel":
            side = math.isqrt(shape[2])
            count = math.isqrt(shape[1])
            grid = (side * count, side * count)
            return Windows(Place(_stride(size, grid), grid, frame), 0, (side, side))
        if kind in ("MobileVitBlock", "MobileVitV2Block"):
            patch = (int(part.patch_size[0]), int(part.patch_size[1]))
            first = kind == "MobileVitV2Block"
            places = math.prod(shape[2:]) if first else shape[0] // BATCH * shape[1]
            rows = round(math.sqrt(places * size[0] / size[1]))
            grid = (rows, places // rows)
            if not _is_grid(grid, size):
                return f"its input {shape} is not a map of the image"
            return PatchPositions(Place(_stride(size, grid), grid, frame), 0, patch, first)
    return None


def _unrolled(candidate: _Candidate, size: Size, frame: Frame, network: Any) -> Layout | str:
    """Return Hiera's order of tokens in a block."""
    tokens, index = (
        candidate.call.input_shape[1],
        int(re.findall(r"blocks\.(\d+)\.", candidate.call.name)[0]),
    )
    numbers = torch.arange(tokens, device="cpu").view(1, tokens, 1)
    with torch.device("cpu"):
        order = network.reroll(numbers, index)
    grid = order.shape[1], order.shape[2]
    if math.prod(grid) != tokens:
        return "its tokens are not a map of the image"
    place = Place(_stride(size, grid), grid, frame)
    return Permuted(place, 0, order.flatten())
