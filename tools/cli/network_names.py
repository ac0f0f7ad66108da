"""Names of networks in folders, tables, plots and exports, such as ``deit_t_afbo+sbm``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def network_name(backbone: str, token_mixer: Any) -> str:
    """Name a network by its backbone and the token mixer that replaces the host's own.

    Args:
        backbone: Its registered name, which may include a token mixer (``posmlp_t_lrpe``).
        token_mixer: The value of ``backbone.token_mixer``: a name, options with ``name``, or None.
    """
    name = token_mixer.get("name") if isinstance(token_mixer, Mapping) else token_mixer
    if not isinstance(name, str) or backbone.endswith(f"_{name}"):
        return backbone
    return f"{backbone}+{name}"


def config_network_name(backbone: Mapping[str, Any]) -> str:
    """Name the network of a config's ``backbone`` group."""
    return network_name(str(backbone["name"]), backbone.get("token_mixer"))
