"""One host of each family, the first of its file or package, for tests that hold for all."""

import copy
import functools
from collections.abc import Collection, Sequence

import pytest
from torch import nn

from backbones import Backbone, create_backbone, list_backbones, list_hosts
from backbones.registry import find_host


def rest_slow(cases: Sequence, quick: Collection) -> list:
    """The cases of a test, of which only the quick ones run by default."""
    return [pytest.param(case, marks=() if case in quick else pytest.mark.slow) for case in cases]


_FILES = {
    find_host(name).build.__module__.split(".")[2]: name  # backbones.hosts.<file or package>
    for name in reversed(list_hosts())
}
SMALLEST = sorted(_FILES.values())
# Alone, and with a mixer in every FFN where there are any.
_BOTH = [
    name
    for host in SMALLEST
    for name in (host, f"{host}_afbo")
    if name in list_backbones(f"{host}*")
]
SWAPPED = [name for name in _BOTH if f"{name}_afbo" not in _BOTH]
# Of those with mixers the default suite takes two, one for tokens and one for maps.
_QUICK = ("deit_t_afbo", "swin_t_afbo")
NAMES = rest_slow(_BOTH, (*SMALLEST, *_QUICK))
TOKEN_SLOTS = [host for host in SMALLEST if "token" in find_host(host).slots]


def shorten(network: nn.Module) -> nn.Module:
    """Keep the first two of equal blocks in a row; shifted and plain windows are among them."""
    for module in list(network.modules()):
        for name, blocks in list(module.named_children()):
            if isinstance(blocks, nn.Sequential | nn.ModuleList) and len(blocks) > 2:
                shapes = [{k: v.shape for k, v in b.state_dict().items()} for b in blocks]
                if shapes[0] and all(shape == shapes[0] for shape in shapes):
                    setattr(module, name, blocks[:2])
    return network


@functools.cache
def _short(name: str, dense: bool) -> Backbone:
    return shorten(create_backbone(name, dense=dense))


def short(name: str, *, dense: bool = False) -> Backbone:
    """A backbone of few blocks for what does not depend on depth; each is initialised once."""
    return copy.deepcopy(_short(name, dense))
