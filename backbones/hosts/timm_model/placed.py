"""A mixer in the place of a module of timm's."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from backbones.hosts.timm_model.layouts import ChannelsFirst, Layout, TransposedTokens
from backbones.mixer import Mixer, PointwiseMixer, PrefixMixing
from backbones.replace import share_state


class Placed(nn.Module):
    """A mixer behind a conversion of its block's layout; other arguments of the block are unused.

    Args:
        mixer: Gets the map (B, h, w, C).
        layout: Layout of the block's tensor.
        shortcut: Add the input, as the replaced module did.

    Attributes:
        replaced: Keys and shapes of the module that it replaced.
        is_related: True if that module was a mixer of the same class; never so in timm.
    """

    replaced: Mapping[str, torch.Size]
    is_related = False

    def __init__(self, mixer: Mixer, layout: Layout, shortcut: bool = False) -> None:
        super().__init__()
        self.mixer, self.layout, self.shortcut = mixer, layout, shortcut
        self.replaced = {}

    @property
    def prefix_mixing(self) -> PrefixMixing:
        """The mixer's treatment of prefix tokens."""
        return self.mixer.prefix_mixing

    def take_earlier_form(
        self, tensors: Mapping[str, Tensor], export_options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Change the mixer as ``Mixer.take_earlier_form`` does."""
        inside = {k.removeprefix("mixer."): v for k, v in tensors.items() if k.startswith("mixer.")}
        return self.mixer.take_earlier_form(inside, export_options)

    def forward(self, x: Tensor, *unused: Any, **unused_too: Any) -> Tensor:
        """Return the mixed tensor in the layout of ``x``."""
        mixed = self._mixed(x)
        return x + mixed if self.shortcut else mixed

    def _mixed(self, x: Tensor) -> Tensor:
        is_last = not isinstance(self.layout, ChannelsFirst | TransposedTokens) and not getattr(
            self.layout, "channels_first", False
        )
        is_alike = isinstance(self.mixer, PointwiseMixer) and self.mixer.prefix_mixing == "none"
        if is_last and is_alike:
            return self.mixer(x)
        map_, prefix = self.layout.fold(x)
        if prefix is None:
            return self.layout.unfold(self.mixer(map_), None, x)
        map_, prefix = self.mixer(map_, prefix)
        return self.layout.unfold(map_, prefix, x)


def without_windows(block: nn.Module, method: str) -> nn.Module:
    """Return a block whose method that cuts windows calls its attention on the whole map."""
    kind: Any = type(block)
    return share_state(block, _plain_class(kind, method))


@functools.cache
def _plain_class(kind: Any, method: str) -> type[nn.Module]:
    def attend(self: Any, x: Tensor, *unused: Any, **unused_too: Any) -> Tensor:
        return self.attn(x)

    return type(f"Whole{kind.__name__}", (Whole, kind), {method: attend, "method": method})


class Whole(nn.Module):
    """Base class of such blocks, made at run time."""

    method: str

    def __reduce__(self) -> tuple[Any, ...]:
        return _bare, (type(self).__bases__[1], self.method), self.__dict__


def _bare(kind: Any, method: str) -> nn.Module:
    plain_kind = _plain_class(kind, method)
    return plain_kind.__new__(plain_kind)
