"""How networks are called in folders, tables, plots and exports: ``deit_t_afbo+sbm``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def network_name(backbone: str, token_mixer: Any) -> str:
    """Name a network by its backbone and the token mixer that replaces the host's own.

    Args:
        backbone: Its registered name, which may have a token mixer in it (``posmlp_t_lrpe``).
        token_mixer: What ``backbone.token_mixer`` is: a name, options with ``name``, or None.
    """
    name = token_mixer.get("name") if isinstance(token_mixer, Mapping) else token_mixer
    if not isinstance(name, str) or backbone.endswith(f"_{name}"):
        return backbone
    return f"{backbone}+{name}"


def name_of(backbone: Mapping[str, Any]) -> str:
    """Name the network of a config's ``backbone``."""
    return network_name(str(backbone["name"]), backbone.get("token_mixer"))
