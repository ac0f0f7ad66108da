"""Names of networks in folders, tables, plots and exports, such as ``deit_t_afbo+sbm``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backbones.options import mixer_label
from tools.cli.catalogue import catalogue


def network_name(backbone: str, token_mixer: Any, mixer: Any = None) -> str:
    """Name a network by its backbone and the mixers that replace the host's own.

    Args:
        backbone: Its registered name, which may include a token mixer (``posmlp_t_lrpe``).
        token_mixer: The value of ``backbone.token_mixer``: a name, options with ``name``, a list
            of these, or None.
        mixer: The value of ``backbone.mixer``.
    """
    for label in (mixer_label(mixer), mixer_label(token_mixer)):
        if label and not backbone.endswith(f"_{label}"):
            backbone = f"{backbone}+{label}"
    return backbone


def config_network_name(backbone: Mapping[str, Any]) -> str:
    """Name the network of a config's ``backbone`` group."""
    name = name_with_model(str(backbone["name"]), backbone.get("model"))
    return network_name(name, backbone.get("token_mixer"), backbone.get("mixer"))


def name_with_model(backbone: str, model: str | None) -> str:
    """Add the model of another library to a backbone's name: ``timm_vit_base_patch16_224_afbo``."""
    if not model:
        return backbone
    host = catalogue().host_of(backbone)
    return f"{host}_{model}{backbone.removeprefix(host)}"
