"""One host of each family, the first of its file or package, for tests that hold for all."""

import pytest

from backbones import list_backbones, registry

_FILES = {
    entry.build.__module__.split(".")[2]: name  # backbones.hosts.<file or package>
    for name, entry in reversed(registry._HOSTS.items())
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
NAMES = [
    pytest.param(name, marks=() if name in (*SMALLEST, *_QUICK) else pytest.mark.slow)
    for name in _BOTH
]
TOKEN_SLOTS = [host for host in SMALLEST if "token" in registry._HOSTS[host].slots]
