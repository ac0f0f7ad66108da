"""Learning rate and weight decay per parameter: layer-wise rates, groups by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn

from backbones.options import check_arguments, check_complete, unknown
from backbones.parameters.decay import decayed_vectors
from backbones.parameters.layer_scales import Layers, layer_scales


class Rule(NamedTuple):
    """Learning rate and weight decay of a parameter.

    Attributes:
        lr_scale: Its rate over the schedule's.
        exempt: True if it is exempt from weight decay, see ``without_decay``.
        weight_decay: Its decay.
    """

    lr_scale: float
    exempt: bool
    weight_decay: float


class Group(NamedTuple):
    """Parameters by a pattern of their names, with their own options."""

    match: str
    lr_scale: float
    weight_decay: float | None


def without_decay(model: nn.Module) -> frozenset[str]:
    """Names of the parameters that weight decay leaves alone.

    These are vectors and scalars (norms, biases, layer scales) except ``decayed_vectors``, and what
    the backbone's authors name, as in timm, DeiT and Swin.
    """
    chosen: set[nn.Parameter] = set()
    backbone = getattr(model, "backbone", None)
    if backbone is not None:
        names = backbone.no_weight_decay
        chosen = {p for name, p in backbone.named_parameters() if name in names}
    vectors = decayed_vectors(model)
    return frozenset(
        name
        for name, p in model.named_parameters()
        if (p.ndim <= 1 and name not in vectors) or p in chosen
    )


def parameter_rules(
    model: nn.Module,
    weight_decay: float,
    *,
    layer_decay: float | None = None,
    layers: Layers | None = None,
    groups: Sequence[Mapping[str, Any]] | None = None,
) -> dict[str, Rule]:
    """Return the rule of each parameter, before a strategy shards and flattens them.

    Args:
        model: With its ``backbone``, if it has one; what is not in it learns at full rate.
        weight_decay: Decay of all other parameters.
        layer_decay: The rate of a layer over that of the next one; None: one rate for all.
        layers: Meaning of a layer, see ``layer_scales``; None: every block.
        groups: ``match``, a pattern of names (without ``model.`` before them), with ``lr_scale``
            or ``weight_decay`` or both. The first that matches counts; its ``lr_scale`` comes on
            top of layer-wise rates, its ``weight_decay`` takes the place of the usual one.

    Raises:
        ValueError: A value out of range, a pattern without a match, a model without layers.
    """
    if layers is not None and layer_decay is None:
        raise ValueError(
            f"optimizer.layers={layers} needs optimizer.layer_decay; pass both, "
            "such as optimizer.layer_decay=0.9, or optimizer.layers=null"
        )
    if weight_decay < 0:
        raise ValueError(f"optimizer.weight_decay must not be below 0, got {weight_decay}")
    chosen = [_group(index, options) for index, options in enumerate(groups or ())]
    scales = {} if layer_decay is None else _scales(model, layer_decay, layers or "blocks")
    exempt = without_decay(model)
    rules, unmatched = {}, {group.match for group in chosen}
    for name, parameter in model.named_parameters():
        shown = name.removeprefix("model.")
        group = next((g for g in chosen if fnmatchcase(shown, g.match)), None)
        unmatched -= {g.match for g in chosen if fnmatchcase(shown, g.match)}
        scale, decay = scales.get(parameter, 1.0), 0.0 if name in exempt else weight_decay
        if group is not None:
            scale *= group.lr_scale
            decay = decay if group.weight_decay is None else group.weight_decay
        rules[name] = Rule(scale, name in exempt, decay)
    if unmatched:
        known = [name.removeprefix("model.") for name in rules]
        some = f"names are such as {known[0]} and {known[-1]}; * stands for any part of one."
        raise ValueError(unknown("parameter (optimizer.groups)", min(unmatched), known, some))
    return rules


def param_groups(model: nn.Module, rules: Mapping[str, Rule], lr: float) -> list[dict[str, Any]]:
    """Return the trainable parameters as torch's optimisers take them, one group per rule.

    The fastest come first, and of these the decayed ones, so that the order of a plain run does not
    depend on the network.
    """
    gathered: dict[Rule, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            gathered.setdefault(rules[name], []).append(parameter)
    order = sorted(gathered, key=lambda r: (-r.lr_scale, r.exempt, -r.weight_decay))
    return [
        {
            "params": gathered[rule],
            "weight_decay": rule.weight_decay,
            "lr": lr * rule.lr_scale,
            "lr_scale": rule.lr_scale,
        }
        for rule in order
    ]


def schedule_rate(group: Mapping[str, Any]) -> float:
    """Return the schedule's rate, of which a group of an optimiser has its share."""
    # Older checkpoints lack shares.
    return float(group["lr"] / group.get("lr_scale", 1.0))


def group(*, match: str, lr_scale: float = 1.0, weight_decay: float | None = None) -> Group:
    """Read an entry of ``optimizer.groups``; see ``parameter_rules``."""
    return Group(match, lr_scale, weight_decay)


def _group(index: int, options: Mapping[str, Any]) -> Group:
    name = f"optimizer.groups.{index}"
    if not isinstance(options, Mapping):
        raise ValueError(
            f"{name}={options} is not a group; give a pattern with its options, such as "
            "optimizer.groups=[{match: 'decode_head.*', lr_scale: 10}]"
        )
    check_complete(group, options, name)
    check_arguments(group, options, name)
    made = group(**options)
    if made.lr_scale <= 0:
        raise ValueError(f"{name}.lr_scale must be above 0, got {made.lr_scale}")
    if made.weight_decay is not None and made.weight_decay < 0:
        raise ValueError(f"{name}.weight_decay must not be below 0, got {made.weight_decay}")
    return made


def _scales(model: nn.Module, decay: float, layers: Layers) -> dict[nn.Parameter, float]:
    if not 0 < decay <= 1:
        raise ValueError(f"optimizer.layer_decay must be above 0 and at most 1, got {decay}")
    backbone = getattr(model, "backbone", None)
    if backbone is None:
        raise ValueError("optimizer.layer_decay is for models around a backbone; leave it out")
    scales = layer_scales(backbone, decay, layers)
    return {parameter: scales[name] for name, parameter in backbone.named_parameters()}
