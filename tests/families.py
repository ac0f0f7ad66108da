"""One host of each family, the first of its file or package, for tests that hold for all."""

from backbones import list_backbones, registry

_FILES = {
    entry.build.__module__.split(".")[2]: name  # backbones.hosts.<file or package>
    for name, entry in reversed(registry._HOSTS.items())
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
