"""Facts of a built backbone besides its mixers, which comparisons depend on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from backbones.base import Backbone
from backbones.factory import backbone_schema, create_backbone
from backbones.registry import look_up

# Options of a backbone that say what is in its slots, or where its weights come from.
MIXERS = ("name", "mixer", "token_mixer", "pretrained")


def describe_network(backbone: Backbone) -> dict[str, Any]:
    """Facts of the network itself, read from its modules; two equal ones differ in mixers alone.

    Returns:
        ``host``, its name; ``class_tokens``, tokens beside the map in its blocks; ``pooling``, what
        an embedding reads; ``norms``, classes of the norms outside of mixers; ``host_parameters``,
        those outside of the slots for mixers.
    """
    slots = [*backbone.token_mixers().values(), *backbone.channel_mixers().values()]
    for block in backbone.modules():  # some hosts have slots beside their blocks', such as LVT
        slots += [block.get_submodule(name) for name in getattr(block, "filled", ())]
    in_slots = {id(p) for module in slots for p in module.parameters()}
    inside = {id(part) for module in slots for part in module.modules()}
    outside = [part for part in backbone.modules() if id(part) not in inside]
    return {
        "host": look_up(backbone.name)[0].name,
        "class_tokens": backbone.num_prefix_tokens,
        "pooling": "none, for dense prediction" if backbone.dense else backbone.pooling,
        "norms": sorted({type(part).__name__ for part in outside if _is_norm(part)}),
        "host_parameters": sum(p.numel() for p in backbone.parameters() if id(p) not in in_slots),
    }


def unlike_host(backbone: Backbone, options: Mapping[str, Any]) -> str | None:
    """Say how a network with swapped-in mixers is built otherwise than its plain host.

    Both are built, the plain host with what was typed for this network, and compared.

    Args:
        backbone: As built.
        options: Of ``create_backbone``, with or without the defaults of this name.

    Returns:
        A sentence, such as ``deit_t_iffn is built without a class token (mean pooling), unlike
        deit_t``; None if they differ in their mixers alone.
    """
    if not backbone.mixers():
        return None
    host = look_up(backbone.name)[0].name
    usual, plain_usual = backbone_schema(backbone.name), backbone_schema(host)
    typed = {
        key: value
        for key, value in options.items()
        if key not in MIXERS and key in usual and value != usual[key]
    }
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        plain = describe_network(create_backbone(host, **typed))
    own = describe_network(backbone)
    said = []
    if own["class_tokens"] < plain["class_tokens"]:
        pooling = own["pooling"].replace("mean of the map", "mean pooling")
        said.append("without a class token" + f" ({pooling})" * (not backbone.dense))
    said += [
        f"with {key}={str(usual[key]).lower()}"
        for key in plain_usual
        if key not in (*MIXERS, *typed, "class_token") and usual[key] != plain_usual[key]
    ]
    more = own["host_parameters"] - plain["host_parameters"]
    if more and not said:
        said.append(f"with {abs(more):,} parameters {'more' if more > 0 else 'fewer'} in the host")
    token = backbone.record.get("token_mixer") or {}
    beside = f" with token_mixer={token['name']}" if token and backbone.name == host else ""
    return f"{backbone.name}{beside} is built {' and '.join(said)}, unlike {host}" if said else None


def _is_norm(module: nn.Module) -> bool:
    return "Norm" in type(module).__name__ and not any(module.children())
