"""Description of a built backbone outside its mixers, for comparisons."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from backbones.base import Backbone
from backbones.factory import backbone_schema, create_backbone
from backbones.options import mixer_label
from backbones.registry import look_up

# Options of a backbone that set its mixers, the source of its weights or its adapters.
MIXERS = ("name", "mixer", "token_mixer", "pretrained", "lora")


def describe_network(backbone: Backbone) -> dict[str, Any]:
    """Describe a network outside its mixers by its modules.

    Returns:
        ``host``, its name; ``class_tokens``, the number of prefix tokens; ``pooling``, the source
        of the embedding; ``norms``, the classes of norms outside of mixers; ``host_parameters``,
        the number of parameters outside of the slots for mixers, without LoRA's adapters; and
        ``replaced``, such as "1 of 23 token mixers", where mixers replace some of several.
    """
    slots = [*backbone.token_mixers().values(), *backbone.channel_mixers().values()]
    for block in backbone.modules():  # some hosts have slots outside their blocks, such as LVT
        slots += [block.get_submodule(name) for name in getattr(block, "filled", ())]
    replaced = [*slots, *(child for m in backbone.modules() for child in _adapters(m))]
    in_slots = {id(p) for module in replaced for p in module.parameters()}
    inside = {id(part) for module in slots for part in module.modules()}
    outside = [part for part in backbone.modules() if id(part) not in inside]
    return {
        "host": look_up(backbone.name)[0].name,
        "class_tokens": backbone.num_prefix_tokens,
        "pooling": "none, for dense prediction" if backbone.dense else backbone.pooling,
        "norms": sorted({type(part).__name__ for part in outside if _is_norm(part)}),
        "host_parameters": sum(p.numel() for p in backbone.parameters() if id(p) not in in_slots),
        **({"replaced": ", ".join(backbone.partly)} if backbone.partly else {}),
    }


def unlike_host(backbone: Backbone) -> str | None:
    """Describe the differences outside of mixers between a network and its plain host.

    The plain host is built with the options of this network.

    Args:
        backbone: Backbone from ``create_backbone``.

    Returns:
        A sentence, such as ``deit_t_iffn is built without a class token (mean pooling), unlike
        deit_t``; None if only the mixers differ.
    """
    if not backbone.mixers():
        return None
    host = look_up(backbone.name)[0].name
    usual, plain_usual = backbone_schema(backbone.name), backbone_schema(host)
    typed_options = host_options(backbone.name, backbone.made_by)
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        host_text = describe_network(create_backbone(host, **typed_options))
    text = describe_network(backbone)
    notes = []
    if text["class_tokens"] < host_text["class_tokens"]:
        pooling = text["pooling"].replace("mean of the map", "mean pooling")
        notes.append("without a class token" + f" ({pooling})" * (not backbone.dense))
    notes += [
        f"with {key}={str(usual[key]).lower()}"
        for key in plain_usual
        if key not in (*MIXERS, *typed_options, "class_token") and usual[key] != plain_usual[key]
    ]
    more = text["host_parameters"] - host_text["host_parameters"]
    if more and not notes:
        notes.append(f"with {abs(more):,} parameters {'more' if more > 0 else 'fewer'} in the host")
    token = mixer_label(backbone.record.get("token_mixer"))
    suffix = f" with token_mixer={token}" if token and backbone.name == host else ""
    return (
        f"{backbone.name}{suffix} is built {' and '.join(notes)}, unlike {host}" if notes else None
    )


def host_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a backbone's plain host: those that differ from the name's defaults."""
    usual = backbone_schema(name)
    return {
        key: value
        for key, value in options.items()
        if key not in MIXERS and key in usual and value != usual[key]
    }


def _adapters(module: nn.Module) -> list[nn.Module]:
    """Return the low-rank parts that peft added to a layer."""
    return [child for name, child in module.named_children() if name.startswith("lora_")]


def _is_norm(module: nn.Module) -> bool:
    return "Norm" in type(module).__name__ and not any(module.children())
