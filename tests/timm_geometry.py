"""Where a changed block of pixels appears in the maps that mixers in timm's models see."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from backbones import Mixer, create_backbone
from backbones.hosts.timm_model import TimmBackbone
from backbones.hosts.timm_model.probing import COMBINING
from backbones.hosts.timm_model.slots import Found

# Functions by which a module before the first slot reads the whole map, such as a gate.
GLOBAL = COMBINING | {"mean", "adaptive_avg_pool2d", "group_norm", "adaptive_avg_pool1d"}


class Seen(Exception):
    """Ends a pass at the first slot."""


class Catching(Mixer):
    """Keeps the map that it gets, and ends the pass."""

    prefix_mixing = "pooled"

    def mix(self, x: Tensor) -> Tensor:
        self.seen = x.detach().clone()
        raise Seen


def build_for_geometry(model: str, kind: str) -> TimmBackbone:
    """A model at an oblong size if it takes one, where its first slot has 12 rows or more."""
    for size in ((128, 192), (256, 384), None):
        try:
            with torch.random.fork_rng():
                torch.manual_seed(0)
                backbone = create_backbone("timm", model=model, img_size=size, fast=False).eval()
        except ValueError:
            continue
        found = first_slot(backbone, kind)
        if found is not None and math.prod(found.layout.place.size) == found.dim:
            continue  # as many places as channels
        if found is not None and (found.layout.place.size[0] >= 12 or size == (256, 384)):
            break
    return backbone


def first_slot(backbone: TimmBackbone, kind: str) -> Found | None:
    return next(iter(backbone.slots.of(kind)), None)


def seen_changes(backbone: TimmBackbone, found: Found) -> tuple[Tensor, Tensor]:
    """Return where the map of a slot changes, and the expected places, both (h, w) and boolean.

    Modules before the slot that read the whole map return their input, or zeros.
    """
    catching = Catching()
    order = list(backbone.facts.calls)
    place = order.index(found.name)
    local = set(_before(backbone, found)) | {
        one.name for one in backbone.slots.places if order.index(one.name) < place
    }
    for name in sorted(local, key=lambda one: -one.count(".")):
        backbone.network.get_submodule(name).register_forward_hook(_silence)
    backbone.fill_slot(found, catching)
    height, width = backbone.img_size
    images = torch.randn(1, 3, height, width, generator=torch.Generator().manual_seed(1))
    maps = []
    top, left = height // 4, width // 2
    bottom, right = top + height // 4, left + width // 4
    for is_changed in (False, True):
        if is_changed:
            images[:, :, top:bottom, left:right] *= -2
        try:
            with torch.no_grad():
                backbone.embed(images)
        except Seen:
            maps.append(catching.seen[0])
    change = (maps[1] - maps[0]).abs().amax(-1)
    rows, columns = change.shape
    expected = torch.zeros(rows, columns, dtype=torch.bool)
    height, width = backbone.facts.padded
    expected[
        round(top * rows / height) : round(bottom * rows / height),
        round(left * columns / width) : round(right * columns / width),
    ] = True
    return change > 1e-4 * change.max(), expected


def spread(mask: Tensor, places: int) -> Tensor:
    """Grow the true region of a mask (h, w)."""
    side = 2 * places + 1
    grown = nn.functional.max_pool2d(mask[None, None].float(), side, 1, places)
    return grown[0, 0].bool()


def _before(backbone: TimmBackbone, found: Found) -> Iterator[str]:
    """Names of the innermost modules before a slot that read the whole map, or other places.

    The latter are convolutions within a stage, many of which reach far before a late slot.
    """
    for name, made in backbone.facts.calls.items():
        if name == found.name:
            return
        module = backbone.network.get_submodule(name)
        if name.endswith("patch_embed"):
            continue
        if isinstance(module, nn.Conv2d) and module.in_channels == module.out_channels:
            if max(module.kernel_size) > max(module.stride) == 1:
                yield name
            continue
        inside = any(
            other.startswith(f"{name}.") and calls[0].functions & GLOBAL
            for other, calls in backbone.facts.calls.items()
        )
        if made[0].functions & GLOBAL and not inside and not found.name.startswith(f"{name}."):
            yield name


def _silence(module: nn.Module, args: tuple, result: object) -> object:
    if isinstance(result, Tensor):
        return args[0] if args[0].shape == result.shape else torch.zeros_like(result)
    return type(result)(torch.zeros_like(r) if isinstance(r, Tensor) else r for r in result)
