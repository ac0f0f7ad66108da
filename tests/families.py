"""One host of each family, the first of its file, for tests that hold for all.

Whole models in packages of their own (SBM, FFNet, PosMLP) have test files of their own.
"""

from backbones import list_backbones, registry

_FILES = {
    entry.build.__module__: name
    for name, entry in reversed(registry._HOSTS.items())
    if entry.build.__module__.count(".") == 2  # backbones.hosts.<file>
}
SMALLEST = sorted(_FILES.values())
# Alone, and with a mixer in every FFN where there are any.
NAMES = [
    name
    for host in SMALLEST
    for name in (host, f"{host}_afbo")
    if name in list_backbones(f"{host}*")
]
SWAPPED = [name for name in NAMES if f"{name}_afbo" not in NAMES]
TOKEN_SLOTS = [host for host in SMALLEST if "token" in registry._HOSTS[host].slots]
